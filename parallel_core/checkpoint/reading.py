"""Tensors on their way from the disk: just the elements that are asked for, straight to where they belong."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from parallel_core import ranks
from parallel_core.checkpoint.manifest import Piece, SavedTensor
from parallel_core.checkpoint.opening import Saved
from parallel_core.checkpoint.safetensors_format import Header, TensorInfo, read_header, stored
from parallel_core.checkpoint.tensor_bytes import CHUNK, dtype_named, in_dtype, memory, runs_of
from parallel_core.checkpoint.untrusted import open_file
from parallel_core.errors import CheckpointError
from parallel_core.local_shards import LocalShard, Region, overlaps

_OPEN_FILES = 32


class SavedReader:
    """Reads the tensors of a checkpoint. Files are read, never mapped: nothing goes on living in one."""

    def __init__(self, saved: Saved) -> None:
        self._saved = saved
        self._headers: dict[int, Header] = {}
        self._descriptors: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def check(self, name: str, tensor: SavedTensor, region: Region) -> None:
        """Make sure that the files which have elements of a region say of the tensor what the manifest says.

        Raises:
            CheckpointError: one does not.
        """
        for piece in tensor.pieces:
            if next(overlaps(region_of(tensor, piece), region), None) is not None:
                self._entry(name, tensor, piece)

    def whole(self, name: str, tensor: SavedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a saved tensor whole, on the CPU, in its own dtype or in another one."""
        target = torch.empty(tensor.shape, dtype=dtype or dtype_named(tensor.dtype), device="cpu")
        self.fill(LocalShard.of(target), name, tensor)
        return target

    def run(self, name: str, tensor: SavedTensor, region: Region) -> torch.Tensor:
        """Return a run of a saved tensor's elements in row-major order, on the CPU."""
        target = torch.empty(region.numel, dtype=dtype_named(tensor.dtype), device="cpu")
        self.fill(LocalShard(target, tensor.shape, region), name, tensor)
        return target

    def same(self, name: str, tensor: SavedTensor, other_name: str, other: SavedTensor) -> bool:
        """Tell whether two saved tensors are the same bits."""
        if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
            return False
        return all(
            torch.equal(ranks.bits(self.run(name, tensor, region)), ranks.bits(self.run(other_name, other, region)))
            for region in runs_of(tensor)
        )

    @torch.no_grad()
    def fill(self, shard: LocalShard, name: str, tensor: SavedTensor) -> None:
        """Overwrite a shard with the elements of a saved tensor that belong there, in the shard's own dtype.

        Raises:
            CheckpointError: a file can't be read, or is not what the manifest says; or the shard's dtype has no room
                for a number.
        """
        if not shard.tensor.is_contiguous() or shard.tensor.is_conj() or shard.tensor.is_neg():
            straight = torch.empty_like(shard.tensor, memory_format=torch.contiguous_format)
            self.fill(LocalShard(straight, shard.shape, shard.region), name, tensor)
            target = shard.tensor
            for dimension, stride in enumerate(target.stride()):
                if stride == 0 and target.shape[dimension]:  # one element that is seen many times (`expand`)
                    target, straight = target.narrow(dimension, 0, 1), straight.narrow(dimension, 0, 1)
            target.copy_(straight)
            return
        elements = shard.tensor.as_strided((shard.tensor.numel(),), (1,))
        dtype = dtype_named(tensor.dtype)
        in_place = elements.device.type == "cpu" and elements.dtype == dtype
        for piece in tensor.pieces:
            for each in overlaps(region_of(tensor, piece), shard.region):
                target = elements[each.second : each.second + each.length]
                if in_place:
                    self._read(name, tensor, piece, each.first, memory(target))
                    continue
                step = max(1, CHUNK // dtype.itemsize)
                for start in range(0, each.length, step):
                    part = torch.empty(min(step, each.length - start), dtype=dtype, device="cpu")
                    self._read(name, tensor, piece, each.first + start, memory(part))
                    target[start : start + part.numel()].copy_(_converted(name, part, target.dtype))

    def _read(self, name: str, tensor: SavedTensor, piece: Piece, first: int, target: memoryview) -> None:
        """Read elements of a piece, from the one numbered `first` on, until the target is full."""
        descriptor, start = self._entry(name, tensor, piece)
        position = start + first * dtype_named(tensor.dtype).itemsize
        while target.nbytes:
            try:
                count = os.preadv(descriptor, [target], position)
            except OSError as error:
                raise CheckpointError(f"{self._path(piece.file)} can't be read: {error.strerror}") from error
            if not count:
                raise CheckpointError(f"{self._path(piece.file)} is damaged: it ends before the tensor {name!r} does")
            target, position = target[count:], position + count

    def _entry(self, name: str, tensor: SavedTensor, piece: Piece) -> tuple[int, int]:
        """Return a descriptor of the file that has a piece, and where in it the piece begins."""
        descriptor = self._open(piece.file)
        header = self._headers[piece.file]
        entry = header.entries.get(name)
        expected = stored(TensorInfo(tensor.dtype, piece.sizes))
        if entry is None or (entry.dtype, entry.shape) != expected:
            found = "has no such tensor" if entry is None else f"has {entry.dtype}{list(entry.shape)}"
            raise CheckpointError(
                f"{self._path(piece.file)} is damaged: the manifest has {expected[0]}{list(expected[1])} in it for "
                f"{name!r}, and it {found}"
            )
        return descriptor, header.start + entry.data_offsets[0]

    def _open(self, file: int) -> int:
        if file not in self._descriptors:
            if len(self._descriptors) == _OPEN_FILES:
                os.close(self._descriptors.pop(next(iter(self._descriptors))))
            path = self._path(file)
            self._descriptors[file] = open_file(path)
            if file not in self._headers:
                self._headers[file] = read_header(self._descriptors[file], path)
        return self._descriptors[file]

    def _path(self, file: int) -> Path:
        return self._saved.folder / self._saved.manifest.files[file].name


def _converted(name: str, elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if elements.is_complex() and dtype.is_complex:
        return torch.view_as_complex(_converted(name, torch.view_as_real(elements), dtype.to_real()))
    return in_dtype(name, elements, dtype)


def region_of(tensor: SavedTensor, piece: Piece) -> Region:
    """Return which elements of a saved tensor a piece has."""
    if len(piece.offsets) == len(tensor.shape):
        return Region(tensor.shape, piece.offsets, piece.sizes)
    return Region.flat(math.prod(tensor.shape), piece.offsets[0], piece.sizes[0])
