"""The command `parallel-core checkpoint`: what is in one, whether it is whole, a full one of it, what two differ in."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

from rich.filesize import decimal

from parallel_core.checkpoint.describing import SHOWN, counted, cut, describe
from parallel_core.checkpoint.manifest import MANIFEST, read_manifest
from parallel_core.checkpoint.opening import open_saved
from parallel_core.checkpoint.verifying import verify
from parallel_core.cli.printing import print_table, printable, progress_bars
from parallel_core.errors import CheckpointError, ParallelCoreError

if TYPE_CHECKING:
    from parallel_core.checkpoint.comparing import TensorDifference

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_DTYPES = ("fp32", "bf16", "fp16")  # of parallel_core.checkpoint.consolidating, which needs torch


def run(options: argparse.Namespace) -> int:
    """Run what the parser of `add_parser` has found, and return the exit code.

    Raises:
        CheckpointError: as the action; also where a file makes it fail in a way that nobody has thought of: files may
            come from anyone.
        OSError: the output can't be written.
    """
    try:
        return int(options.run(options))
    except (ParallelCoreError, OSError):
        raise
    except Exception as error:
        raise CheckpointError(
            f"{options.action} failed, and should have said why: {type(error).__name__}: {error}; please report it, "
            f"with the checkpoint's {MANIFEST}"
        ) from error


def inspect(path: Path, *, every: bool = False) -> int:
    """Print what is in a checkpoint, or in weights from elsewhere.

    Raises:
        CheckpointError: there is no such thing, or it is damaged.
    """
    for part in describe(open_saved(path), every=every):
        if part.rows:
            _print(part.header, part.rows, part.title)
    return 0


def check(path: Path) -> int:
    """Print which files are not what was saved; return 1 if there is one.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    with progress_bars() as bar:
        verdict = verify(path, bar("comparing"))
    if verdict.bad:
        _print(("file", "what is wrong"), list(verdict.bad.items()))
    count = counted(len(verdict.bad) + len(verdict.good), "file")
    print(f"{path}: {f'{len(verdict.bad)} of {count} damaged' if verdict.bad else f'{count}, none damaged'}")
    if verdict.unhashed:
        count = counted(len(verdict.unhashed), "file")
        print(f"without a hash: {count}; a change that leaves the size and the header as they were can't be seen")
    return 1 if verdict.bad else 0


def consolidate(source: Path, target: Path, dtype: str | None, max_file_bytes: int | None, *, verify: bool) -> int:
    """Write a full checkpoint of a sharded one.

    Raises:
        CheckpointError: the source is damaged, or the target can't be written.
    """
    from parallel_core.checkpoint import consolidating  # torch is needed from here on

    with progress_bars() as bar:
        place = consolidating.consolidate(
            source,
            target,
            dtype=None if dtype is None else consolidating.DTYPES[dtype],
            max_file_bytes=max_file_bytes,
            verify=verify,
            checking=bar("comparing"),
            writing=bar("writing"),
        )
    manifest = read_manifest(place)
    print(f"wrote {target}: a full checkpoint, {decimal(manifest.nbytes)} in {counted(len(manifest.files), 'file')}")
    return 0


def diff(one: Path, other: Path, *, model_only: bool = False, every: bool = False) -> int:
    """Print what differs between two checkpoints, the largest difference first; return 1 if anything does.

    Raises:
        CheckpointError: one of them can't be read.
    """
    from parallel_core.checkpoint.comparing import compare  # torch is needed from here on

    with progress_bars() as bar:
        found = compare(open_saved(one), open_saved(other), model_only=model_only, told=bar("comparing"))
    if found.is_same:
        print(f"the same bits: {counted(found.compared, 'tensor')}{'' if model_only else ', and all values'}")
        return 0
    names = str(one), str(other)
    if found.tensors:
        title = f"{len(found.tensors)} of {counted(found.compared, 'tensor')} with differences"
        header = ("part", "tensor", *names, "largest difference", "elements that differ")
        _print_some(header, [_row_of_tensor(each) for each in found.tensors], title, every=every)
    if found.values:
        title = f"{counted(len(found.values), 'value')} with differences"
        rows = [(each.place, *(_value(text, every=every) for text in (each.one, each.other))) for each in found.values]
        _print_some(("value", *names), rows, title, every=every)
    return 1


def _row_of_tensor(found: TensorDifference) -> tuple[str, ...]:
    infos = ["none" if info is None else str(info) for info in (found.one, found.other)]
    if found.distance is None or found.one is None:
        return (found.part, found.name, *infos, "", "")
    count = f"{found.distance.count} of {math.prod(found.one.shape)}"
    return (found.part, found.name, *infos, f"{found.distance.largest:g}", count)


def _value(text: str | None, *, every: bool) -> str:
    if text is None:
        return "none"
    return text if every else cut(text)


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to those of `parallel-core`."""
    parser = commands.add_parser("checkpoint", help="look into checkpoints, check, consolidate and compare them")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    path = "a checkpoint's folder, a .safetensors file, or a folder of them"

    show = actions.add_parser("inspect", help="show what is in a checkpoint")
    show.add_argument("path", type=Path, metavar="PATH", help=path)
    show.add_argument("--all", action="store_true", help="a line for each tensor and file, however many there are")
    show.set_defaults(run=lambda given: inspect(given.path, every=given.all))

    verify = actions.add_parser("verify", help="name the files that are not what was saved; exit code 1 if any is")
    verify.add_argument("path", type=Path, metavar="PATH", help=path)
    verify.set_defaults(run=lambda given: check(given.path))

    full = actions.add_parser("consolidate", help="write a sharded checkpoint once more, as a full one")
    full.add_argument("source", type=Path, metavar="PATH", help="a checkpoint's folder")
    full.add_argument("target", type=Path, metavar="TARGET", help="the folder to make; a checkpoint there is replaced")
    full.add_argument("--dtype", choices=_DTYPES, help="what the model's weights of floating point are written in")
    full.add_argument(
        "--max-file-size", type=_size, metavar="SIZE", help="how large the tensors of one file may be: 5GB, 500MiB"
    )
    full.add_argument("--no-verify", action="store_true", help="compare the source's sizes alone, not its hashes")
    full.set_defaults(
        run=lambda given: consolidate(
            given.source, given.target, given.dtype, given.max_file_size, verify=not given.no_verify
        )
    )

    compare = actions.add_parser("diff", help="show what differs between two checkpoints; exit code 1 if anything does")
    compare.add_argument("one", type=Path, metavar="A", help=path)
    compare.add_argument("other", type=Path, metavar="B", help="the same")
    compare.add_argument("--model-only", action="store_true", help="leave out all but the model's weights and buffers")
    compare.add_argument("--all", action="store_true", help="show all that differs, however much it is")
    compare.set_defaults(run=lambda given: diff(given.one, given.other, model_only=given.model_only, every=given.all))


def _size(text: str) -> int:
    """Return the number of bytes that `5GB` or `500MiB` means."""
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([a-z]*)", text.strip().lower())
    nbytes = int(Decimal(found[1]) * units[found[2]]) if found is not None and found[2] in units else 0
    if nbytes < 1:
        raise argparse.ArgumentTypeError(
            f"expected a number of bytes, with a unit of {', '.join(unit for unit in _UNITS if unit)}: found {text!r}"
        )
    return nbytes


def _print(header: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    print_table(map(printable, header), [[printable(cell) for cell in row] for row in rows], title=title)


def _print_some(header: Sequence[str], rows: Sequence[Sequence[str]], title: str, *, every: bool) -> None:
    shown = rows if every else rows[:SHOWN]
    _print(header, shown, title)
    if len(shown) < len(rows):
        print(f"and {len(rows) - len(shown)} more: --all shows them")
