"""Who writes what: each element of each tensor once, by a rank that has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel_core.checkpoint.safetensors_format import SIZES, TensorInfo
from parallel_core.errors import CheckpointError
from parallel_core.local_shards import Region


class Held(NamedTuple):
    """What a rank tells the others of one of its shards.

    Attributes:
        dtype, shape: of the whole tensor.
        region: which of its elements the rank has.
        alike: whether other ranks that have the same are sure to have the same values.
    """

    dtype: str
    shape: tuple[int, ...]
    region: Region
    alike: bool


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that is to be saved.

    Attributes:
        info: its dtype, as it is saved, and its shape.
        pieces: which rank writes which of its elements.
    """

    info: TensorInfo
    pieces: tuple[tuple[int, Region], ...]


def planned(
    held: Sequence[Mapping[str, Held]], what: str, *, dtypes: Mapping[str, str], one_writer: bool
) -> dict[str, PlannedTensor]:
    """Return who writes what, the same on every rank.

    Args:
        held: what each rank holds, by rank and name.
        what: what errors call the tensors.
        dtypes: what some tensors of floating point are saved in, by name; the others in their own dtype.
        one_writer: whether all goes through rank 0, which then writes what it has itself. Otherwise ranks that have the
            same elements, with the same values, share the work.

    Raises:
        CheckpointError: the ranks don't hold the same tensors, or not all of their elements.
    """
    tensors: dict[str, PlannedTensor] = {}
    load = [0] * len(held)
    for name in dict.fromkeys(name for table in held for name in table):
        found = [(rank, table[name]) for rank, table in enumerate(held) if name in table]
        first = found[0][1]
        holders: dict[Region, list[int]] = {}
        for rank, each in found:
            if (each.dtype, each.shape) != (first.dtype, first.shape):
                raise CheckpointError(
                    f"{what} {name!r} is {TensorInfo(first.dtype, first.shape)} on rank {found[0][0]}, and "
                    f"{TensorInfo(each.dtype, each.shape)} on rank {rank}; the ranks must hold parts of one tensor"
                )
            if each.region.numel:
                holders.setdefault(each.region, []).append(rank)
        covered = sum(region.numel for region in holders)
        if covered != math.prod(first.shape):
            raise CheckpointError(
                f"{what} {name!r}: the ranks hold {covered} elements of {math.prod(first.shape)}; every element must "
                f"be held by some rank, in the same part on each that has it"
            )
        pieces = []
        for region, owners in holders.items():
            share = not one_writer and all(table[name].alike for table in held if name in table)
            owner = min(owners, key=load.__getitem__) if share else owners[0]
            load[owner] += region.numel * SIZES[first.dtype]
            pieces.append((owner, region))
        is_float = first.dtype.startswith(("float", "bfloat"))
        info = TensorInfo(dtypes.get(name, first.dtype) if is_float else first.dtype, first.shape)
        tensors[name] = PlannedTensor(info, tuple(pieces))
    return tensors
