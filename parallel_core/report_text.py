"""The wrap report as text: a block of lines to read in a log, short for a large model too."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel_core.report import ReportedUnit, WrapReport

MOST_LINES = 12  # of units: with more lines than this nobody sees the other facts
MOST_NAMES = 6  # of one tied parameter
MOST_RANKS = 8  # told one by one
WIDTH = 100  # of a line of settings, in characters


def report_text(report: WrapReport) -> str:
    """Return a wrap report as a block of lines, with what is alike folded."""
    count = len(report.held)
    lines = [
        f"wrapped by strategy {report.strategy!r} ({report.plugin}) on {count} rank{'s' if count > 1 else ''}",
        *_block("settings", _told_settings(report.settings, report.changed)),
        *_block("parameters", [_told_parameters(report)]),
        *_block("values", [f"from {report.values}"]),
        *_block("units", _folded(report.units) if report.units else ["none: the root is all of the model"]),
        *_block("root", [_told_root(report.root)]),
        *_block("tied", _folded_ties(report.tied)),
        *_block("held", _told_held(report.held, report.devices, report.nbytes)),
    ]
    return "\n".join(lines)


def _block(title: str, lines: Iterable[str]) -> list[str]:
    """Return lines in a column beside their title; nothing where there are no lines."""
    return [f"  {title if index == 0 else '':<10}  {line}" for index, line in enumerate(lines)]


def _told_settings(settings: dict[str, Any], changed: tuple[str, ...]) -> list[str]:
    asked = [f"{name} = {settings[name]!r}" for name in changed]
    default = [f"{name} = {value!r}" for name, value in settings.items() if name not in changed]
    lines = textwrap.wrap(", ".join(asked), WIDTH)
    return [*lines, *textwrap.wrap(f"by default: {', '.join(default)}", WIDTH)] if default else lines


def _told_parameters(report: WrapReport) -> str:
    if not report.dtypes:
        return "none"
    if len(report.dtypes) == 1:
        of = f" of {next(iter(report.dtypes))}"
    else:
        of = f": {' and '.join(f'{count:,} of {dtype}' for dtype, count in report.dtypes.items())}"
    return f"{report.numel:,}{of}, {_told_bytes(report.nbytes)}"


def _told_root(root: ReportedUnit) -> str:
    if not root.parameters:
        return "nothing"
    shown = ", ".join(root.parameters[:3])
    more = f" and {len(root.parameters) - 3} more" if len(root.parameters) > 3 else ""
    return f"{root.numel:,}: {shown}{more}"


def _folded(units: tuple[ReportedUnit, ...]) -> list[str]:
    """Return a line for each kind of unit: of the same size, and the same name but for the numbers in it."""
    kinds: dict[tuple[str, int], list[str]] = {}
    for unit in units:
        kinds.setdefault((re.sub(r"\b\d+\b", "*", unit.name), unit.numel), []).append(unit.name)
    lines = [
        f"{names[0]}: {numel:,}" if len(names) == 1 else f"{names[0]} ... {names[-1]}: {len(names)} units of {numel:,}"
        for (_, numel), names in kinds.items()
    ]
    if len(lines) <= MOST_LINES:
        return lines
    rest = list(kinds.values())[MOST_LINES:]
    return [*lines[:MOST_LINES], f"and {sum(map(len, rest))} more units"]


def _folded_ties(tied: tuple[tuple[str, ...], ...]) -> list[str]:
    """Return a line for each kind of tied parameter: with the same names but for the numbers in them."""
    kinds: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for group in tied:
        kinds.setdefault(tuple(re.sub(r"\b\d+\b", "*", name) for name in group), []).append(group)
    lines = [
        _told_tie(groups[0]) + (f" ... {_told_tie(groups[-1])}: {len(groups)} parameters" if len(groups) > 1 else "")
        for groups in kinds.values()
    ]
    if len(lines) <= MOST_LINES:
        return lines
    rest = list(kinds.values())[MOST_LINES:]
    return [*lines[:MOST_LINES], f"and {sum(map(len, rest))} more parameters"]


def _told_tie(names: tuple[str, ...]) -> str:
    more = f" = ... and {len(names) - MOST_NAMES} more names" if len(names) > MOST_NAMES else ""
    return " = ".join(names[:MOST_NAMES]) + more


def _told_held(held: tuple[int, ...], devices: tuple[str, ...], nbytes: int) -> list[str]:
    places = sorted({device.partition(":")[0] for device in devices})
    of = f"of {_told_bytes(nbytes)} of parameters, on {' and '.join(places)}"
    if len(set(held)) == 1:
        return [f"{_told_bytes(held[0])} on each rank, {of}"]
    if len(held) <= MOST_RANKS:
        listed = ", ".join(f"{_told_bytes(size)} on rank {index}" for index, size in enumerate(held))
        return [f"{listed}, {of}"]
    least, most = held.index(min(held)), held.index(max(held))
    return [f"from {_told_bytes(held[least])} on rank {least} to {_told_bytes(held[most])} on rank {most}, {of}"]


def _told_bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} bytes"
