"""Whether a state dict fits: found before any tensor moves, and agreed on by all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from parallel_core import ranks
from parallel_core.dtypes import dtype_name, lost_number
from parallel_core.errors import StateDictError, did_you_mean
from parallel_core.hookspecs import StateDictType
from parallel_core.outlines import unsendable
from parallel_core.record import Layout
from parallel_core.tensors import is_dtensor

SHOWN = 10  # names shown of a list in an error: a thousand of them would hide the rest


class IncompatibleKeys(NamedTuple):
    """What `load_model_state_dict` did not load: names that the dict lacks, and names that the model lacks."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Verdict(NamedTuple):
    """What one rank thinks of the state dict it was handed.

    Attributes:
        missing, unexpected: names that it lacks, and names that the model lacks.
        problems: what else is wrong, a line each.
        entries: under `sharded`, a number that tells which entries there are and which of them are sharded.
    """

    missing: list[str]
    unexpected: list[str]
    problems: list[str]
    entries: int = 0


def parse_state_dict_type(value: str) -> StateDictType:
    """Return the member for `full` or `sharded`, given as one or as a string.

    Raises:
        StateDictError: it is something else.
    """
    try:
        return StateDictType(value)
    except ValueError:
        allowed = [member.value for member in StateDictType]
        hint = did_you_mean(str(value), allowed)
        raise StateDictError(f"state_dict_type: expected 'full' or 'sharded', found {value!r}{hint}") from None


def check_flags(**flags: object) -> None:
    """Refuse arguments that are neither True nor False.

    Raises:
        StateDictError: one is something else.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise StateDictError(f"{name}: expected True or False, found {type(value).__name__}")


def check_model_state_dict(
    layout: Layout, state_dict: Any, state_dict_type: StateDictType, *, strict: bool, cast: bool
) -> IncompatibleKeys:
    """Agree on whether a state dict fits a model; a collective. The arguments but the dict are the same on every rank.

    Returns:
        the keys that are not loaded, the same lists on every rank.

    Raises:
        StateDictError: it does not fit; the same error on every rank.
    """
    verdict = verdict_of(state_dict_type, lambda: judge(layout, state_dict, state_dict_type, cast=cast))
    found = agree_on(verdict, strict=strict, of_what="model")
    missing = set(found.missing_keys)
    return IncompatibleKeys([name for name in layout.entries if name in missing], found.unexpected_keys)


def verdict_of(state_dict_type: StateDictType, judge: Callable[[], Verdict]) -> Verdict | None:
    """Return this rank's verdict, or None where its state dict does not count."""
    if state_dict_type is StateDictType.FULL and ranks.rank():
        return None
    try:
        return judge()
    except Exception as error:  # whatever a state dict of a strange kind raises: the other ranks wait for the verdict
        return Verdict([], [], [f"{type(error).__name__}: {error}"])


def entries_number(entries: Iterable[object], state_dict_type: StateDictType) -> int:
    """Return `Verdict.entries`: 0 under `full`, where one dict counts."""
    return 0 if state_dict_type is StateDictType.FULL else zlib.crc32(repr(list(entries)).encode())


def judge(layout: Layout, state_dict: Any, state_dict_type: StateDictType, *, cast: bool) -> Verdict:
    """Compare the state dict of this rank with the model's layout."""
    if not isinstance(state_dict, Mapping):
        return Verdict([], [], [f"expected a dict of tensors by name, found {type(state_dict).__name__}"])
    missing = [name for name in layout.entries if name not in state_dict]
    unexpected = [str(name) for name in state_dict if name not in layout.entries]
    problems: list[str] = []
    for name, spec in layout.entries.items():
        if name not in state_dict:
            continue
        value = state_dict[name]
        if spec is None:
            problems += unsendable(repr(name), value, state_dict_type)
            continue
        found = describe(value)
        if not isinstance(value, torch.Tensor):
            problems.append(f"{name!r}: expected a tensor, found {found}")
        elif is_dtensor(value) and state_dict_type is StateDictType.FULL:
            problems.append(f"{name!r}: found a DTensor in a full state dict; pass state_dict_type='sharded'")
        elif value.layout is not torch.strided:
            problems.append(f"{name!r}: found a sparse tensor; make it dense")
        elif value.is_meta:
            problems.append(f"{name!r}: found a tensor on the meta device, which has no values")
        elif tuple(value.shape) != spec.shape:
            problems.append(f"{name!r}: wrong shape: the model has {spec}, the state dict {found}")
        elif value.dtype != spec.dtype and not (cast and converts(value.dtype, spec.dtype)):
            hint = "; cast=True converts" if converts(value.dtype, spec.dtype) else ""
            problems.append(f"{name!r}: wrong dtype: the model has {spec}, the state dict {found}{hint}")
        elif value.dtype != spec.dtype and (lost := lost_number(_local(value), _local(value).to(spec.dtype))):
            problems.append(f"{name!r}: found {lost}; load it into a model of another dtype")
    if not problems:
        problems = list(_tied_apart(layout, state_dict))
    present = [(name, is_dtensor(state_dict[name])) for name in layout.entries if name in state_dict]
    return Verdict(missing, unexpected, problems, entries_number(present, state_dict_type))


def converts(given: torch.dtype, wanted: torch.dtype) -> bool:
    """Tell whether numbers of one dtype mean the same in another, rounded: integers and bools may not."""
    return (given.is_floating_point and wanted.is_floating_point) or (given.is_complex and wanted.is_complex)


def describe(value: object) -> str:
    """Return a value of a state dict in words: `float32[4, 4]` for a tensor, its class for anything else."""
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    return type(value).__name__


def named(what: str, names: Iterable[str]) -> str:
    """Return `what: 'a', 'b' and 3 more`."""
    listed = [repr(name) for name in names]
    rest = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return f"{what}: {', '.join(listed[:SHOWN])}{rest}"


def _tied_apart(layout: Layout, state_dict: Mapping[str, Any]) -> Iterable[str]:
    for group in layout.tied:
        present = [name for name in group if name in state_dict]
        for name in present[1:]:
            first, other = _local(state_dict[present[0]]), _local(state_dict[name])
            if first is not other and not torch.equal(ranks.bits(first), ranks.bits(other)):
                yield (
                    f"{present[0]!r} and {name!r} are one parameter of the model and have different values in "
                    f"the state dict; drop one of them and load with strict=False"
                )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if is_dtensor(tensor) else tensor


def agree_on(verdict: Verdict | None, *, strict: bool, of_what: str) -> IncompatibleKeys:
    """Make one verdict of all ranks' and raise it, the same error on every rank, or return what is not loaded.

    Args:
        verdict: this rank's, or None where its state dict does not count.
        strict: whether missing and unexpected keys are an error.
        of_what: "model" or "optimizer", for the message.
    """
    verdicts = {index: found for index, found in enumerate(ranks.all_gather(verdict)) if found is not None}
    missing = _merged({index: found.missing for index, found in verdicts.items()})
    unexpected = _merged({index: found.unexpected for index, found in verdicts.items()})
    problems = _merged({index: found.problems for index, found in verdicts.items()})
    lines = []
    if strict and missing:
        lines.append(named("missing keys", missing) + _where(list(missing.values()), len(verdicts)))
    if strict and unexpected:
        hint = did_you_mean(next(iter(unexpected)), missing)
        lines.append(named("unexpected keys", unexpected) + _where(list(unexpected.values()), len(verdicts)) + hint)
    lines += [problem + _where([where], len(verdicts)) for problem, where in list(problems.items())[:SHOWN]]
    if len(problems) > SHOWN:
        lines.append(f"and {len(problems) - SHOWN} more problems like these")
    odd = [index for index, found in verdicts.items() if found.entries != verdicts[0].entries]
    if odd and not missing:
        # Each of them may fit, and loading would still wait for ever: a sharded entry is put together by all ranks.
        lines.append(f"rank {', '.join(map(str, odd))}: not the same entries as on rank 0, or not sharded alike")
    if lines:
        raise StateDictError("\n  - ".join([f"the state dict does not fit the {of_what}; nothing was loaded:", *lines]))
    return IncompatibleKeys(list(missing), list(unexpected))


def _merged(by_rank: Mapping[int, Iterable[str]]) -> dict[str, list[int]]:
    """Turn what each rank found into the ranks that found each, in the order of first sight."""
    merged: dict[str, list[int]] = {}
    for index, found in by_rank.items():
        for text in found:
            merged.setdefault(text, []).append(index)
    return merged


def _where(finders: list[list[int]], judges: int) -> str:
    """Say which ranks found something, unless all that were asked did."""
    found_by = sorted({index for where in finders for index in where})
    if all(len(where) == judges for where in finders):
        return ""
    return f" (on rank {', '.join(map(str, found_by))} alone)"
