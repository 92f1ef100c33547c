"""Whether a manifest says what a save can have written: it may come from anyone, and is followed to files and sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from parallel_core.checkpoint.optimizer_values import OptimizerValues
from parallel_core.checkpoint.safetensors_format import SIZES
from parallel_core.checkpoint.tree import decode
from parallel_core.errors import CheckpointError

if TYPE_CHECKING:
    from parallel_core.checkpoint.manifest import Manifest, Piece, SavedFile, SavedTensor, Section

_YEAR_10000 = 253_402_300_800  # in seconds since 1970; no calendar here goes further
_MOST = 2**63 - 1  # elements; torch counts no further


def is_plain_name(name: str) -> bool:
    """Tell whether a name is one of a file in a folder, and leads nowhere else."""
    return name not in ("", ".", "..") and not {"/", "\0"} & set(name)


def check_sense(manifest: Manifest, random_states: str) -> None:
    """Refuse what no save writes.

    Args:
        manifest: what is to be judged.
        random_states: the name of the file that random states are in.

    Raises:
        CheckpointError: there is such a thing in it.
    """
    if manifest.state_dict_type not in ("full", "sharded"):
        raise CheckpointError(f"its kind is {manifest.state_dict_type!r}, where 'full' or 'sharded' is expected")
    if manifest.world_size < 1:
        raise CheckpointError(f"it was saved by {manifest.world_size} ranks, where at least one is expected")
    if not 0 <= manifest.saved_at < _YEAR_10000:
        raise CheckpointError(f"it was saved {manifest.saved_at:g} seconds after 1970, and no calendar has such a day")
    for file in manifest.files:
        if not is_plain_name(file.name):
            raise CheckpointError(f"it names the file {file.name!r}, which is not one of its own folder")
        if file.size < 0:
            raise CheckpointError(f"the file {file.name!r} has {file.size} bytes")
    names = [file.name for file in manifest.files]
    if again := next((name for name, count in Counter(names).items() if count > 1), None):
        raise CheckpointError(f"it has the file {again!r} more than once")
    if manifest.random_states and random_states not in names:
        raise CheckpointError(f"it has random states, and the file {random_states!r} is not among its files")
    for group in manifest.tied:
        if len(set(group)) < max(2, len(group)):
            raise CheckpointError(f"the tensor with the names {list(group)} has not two names that differ")
    sections = {"model": manifest.model, "optimizer": manifest.optimizer, "objects": manifest.objects}
    for what, section in sections.items():
        if section is not None:
            for name, tensor in section.tensors.items():
                _check_tensor(f"{what}: {name!r}", tensor, manifest.files)
    _check_values(manifest)


def _check_values(manifest: Manifest) -> None:
    """Refuse values that can't be decoded, or refer to tensors that are not there."""
    for what, section in (("model", manifest.model), ("objects", manifest.objects)):
        for name, node in (section.values or {}).items():
            _check_value(f"{what}: {name!r}", node, section)
    if manifest.optimizer is not None:
        section = manifest.optimizer
        try:
            values = OptimizerValues.of(section.values)
            values.groups(_known(section))
        except CheckpointError as error:
            raise CheckpointError(f"optimizer: {error}") from error
        for name, entries in values.state.items():
            for key, node in entries.items():
                _check_value(f"optimizer: {name!r}, {key!r}", node, section)
    _check_value("extra", manifest.extra, None)


def _check_value(where: str, node: Any, section: Section | None) -> None:
    try:
        decode(node, None if section is None else _known(section))
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _known(section: Section) -> Callable[[str], None]:
    def look_up(name: str) -> None:
        if name not in section.tensors:
            raise CheckpointError(f"there is no tensor {name!r}")

    return look_up


def _check_tensor(where: str, tensor: SavedTensor, files: Sequence[SavedFile]) -> None:
    # Empty dimensions don't count: with others beside them, the strides would be too large.
    if tensor.dtype not in SIZES or min(tensor.shape, default=0) < 0 or math.prod(filter(None, tensor.shape)) > _MOST:
        raise CheckpointError(f"{where} is {tensor}, which is no tensor that can be saved")
    numel = math.prod(tensor.shape)
    for piece in tensor.pieces:
        shape = tensor.shape if len(piece.offsets) == len(tensor.shape) else (numel,)
        if (
            piece.file not in range(len(files))
            or not len(piece.offsets) == len(piece.sizes) == len(shape)
            or any(min(a, n) < 0 or a + n > end for a, n, end in zip(piece.offsets, piece.sizes, shape, strict=True))
            or math.prod(piece.sizes) * SIZES[tensor.dtype] > files[piece.file].size
        ):
            raise CheckpointError(f"{where} is {tensor}, and can't have the piece {piece}")
    covered = sum(math.prod(piece.sizes) for piece in tensor.pieces)
    if covered != numel:
        raise CheckpointError(f"{where} is {tensor}, and its pieces have {covered} elements")
    if len({piece.file for piece in tensor.pieces}) < len(tensor.pieces):
        # It lies there under its name, once: both would be read from the same place.
        raise CheckpointError(f"{where} is {tensor}, and two pieces of it are in one file")
    # Those that are boxes, and those that are runs of the tensor laid flat; no strategy so far mixes the two.
    for dimensions in {len(piece.offsets) for piece in tensor.pieces}:
        if pair := _overlapping(
            [each for each in tensor.pieces if len(each.offsets) == dimensions and all(each.sizes)]
        ):
            raise CheckpointError(f"{where} is {tensor}, and two pieces have the same elements: {pair[0]}, {pair[1]}")


def _overlapping(pieces: Sequence[Piece]) -> tuple[Piece, Piece] | None:
    """Return two boxes of one tensor that have elements in common."""
    if len(pieces) < 2 or not pieces[0].offsets:
        return None
    # Along the dimension that they are cut in most often, so that few lie beside each other.
    along = max(range(len(pieces[0].offsets)), key=lambda each: len({piece.offsets[each] for piece in pieces}))
    beside: list[Piece] = []
    for piece in sorted(pieces, key=lambda each: each.offsets[along]):
        beside = [each for each in beside if each.offsets[along] + each.sizes[along] > piece.offsets[along]]
        for other in beside:
            ranges = zip(piece.offsets, piece.sizes, other.offsets, other.sizes, strict=True)
            if all(start < first + count and first < start + size for start, size, first, count in ranges):
                return other, piece
        beside.append(piece)
    return None
