"""What a rank holds of a tensor, as memory: which elements of the whole they are, to be read from and written to.

For strategy authors too: the hook `local_shards` returns these, and checkpoints are saved from them and loaded into
them, without a tensor ever being gathered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from parallel_core.errors import StateDictError
from parallel_core.tensors import is_dtensor

__all__ = ["LocalShard", "Overlap", "Region", "overlaps"]


@dataclass(frozen=True)
class Region:
    """A box of a tensor's elements: along each dimension, `sizes` elements from `offsets` on.

    A run of elements in row-major order that is no box of the tensor is one of the tensor laid flat.

    Attributes:
        shape: the shape of the whole tensor, or `(numel,)` for the tensor laid flat.
        offsets, sizes: one number for each dimension of `shape`.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Region:
        """Return the region of all elements of a tensor of this shape."""
        return cls(shape, (0,) * len(shape), shape)

    @classmethod
    def flat(cls, numel: int, start: int, count: int) -> Region:
        """Return `count` elements from `start` on, of a tensor of `numel` elements in row-major order."""
        return cls((numel,), (start,), (count,))

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.sizes)

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield `(start, count)` of each stretch of neighbouring elements of the whole, in row-major order."""
        if not self.numel:
            return
        # The dimensions behind this one are there in full, so that each run goes on over them.
        last = len(self.shape)
        while last and self.sizes[last - 1 :] == self.shape[last - 1 :]:
            last -= 1
        last = max(last - 1, 0)
        strides = [math.prod(self.shape[dimension + 1 :]) for dimension in range(len(self.shape))]
        count = math.prod(self.sizes[last:])
        first = sum(offset * stride for offset, stride in zip(self.offsets[last:], strides[last:], strict=True))
        outer = [
            range(offset * stride, (offset + size) * stride, stride)
            for offset, size, stride in zip(self.offsets[:last], self.sizes[:last], strides[:last], strict=True)
        ]
        for starts in itertools.product(*outer):
            yield first + sum(starts), count


class Overlap(NamedTuple):
    """Elements that two regions of one tensor have in common, next to each other in both.

    Attributes:
        first, second: where they begin, counted in the elements of the one region and of the other.
        length: how many they are.
    """

    first: int
    second: int
    length: int


def overlaps(one: Region, other: Region) -> Iterator[Overlap]:
    """Yield what two regions of one tensor have in common."""
    ours, theirs = one.runs(), other.runs()
    mine, yours = next(ours, None), next(theirs, None)
    before_mine = before_yours = 0
    while mine is not None and yours is not None:
        start, stop = max(mine[0], yours[0]), min(sum(mine), sum(yours))
        if start < stop:
            yield Overlap(before_mine + start - mine[0], before_yours + start - yours[0], stop - start)
        if sum(mine) <= sum(yours):
            before_mine += mine[1]
            mine = next(ours, None)
        else:
            before_yours += yours[1]
            yours = next(theirs, None)


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of one tensor.

    Attributes:
        tensor: the elements: a plain tensor that shares memory with the model, or with the optimizer's state.
        shape: the shape of the whole tensor.
        region: which of the whole's elements they are; has as many as `tensor`.
        alike: whether all ranks that have this region are sure to have the same values, so that any of them may save
            it. Otherwise the lowest rank's count: buffers, say, that each rank has computed from its own data.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    region: Region
    alike: bool = False

    @classmethod
    def of(cls, value: torch.Tensor, *, alike: bool = False) -> LocalShard:
        """Return the shard of a plain tensor, which is whole, or of a DTensor.

        Args:
            value: the tensor.
            alike: as for the attribute.

        Raises:
            StateDictError: the DTensor is neither sharded nor replicated.
        """
        tensor, shape = value.detach(), tuple(value.shape)
        if not is_dtensor(tensor):
            return cls(tensor, shape, Region.whole(shape), alike)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        if not all(type(placement).__name__ in ("Shard", "Replicate") for placement in tensor.placements):
            raise StateDictError(
                f"a DTensor of shape {list(shape)} is placed as {tensor.placements}; expected Shard and Replicate alone"
            )
        sizes, offsets = compute_local_shape_and_global_offset(shape, tensor.device_mesh, tensor.placements)
        return cls(tensor.to_local(), shape, Region(shape, tuple(offsets), tuple(sizes)), alike)

    @classmethod
    def flat(cls, tensor: torch.Tensor, shape: tuple[int, ...], start: int) -> LocalShard:
        """Return the shard that has the whole's elements from `start` on, in row-major order.

        Args:
            tensor: the elements, of one dimension.
            shape: the shape of the whole tensor.
            start: which of the whole's elements the first one is.
        """
        return cls(tensor.detach(), shape, Region.flat(math.prod(shape), start, tensor.numel()))
