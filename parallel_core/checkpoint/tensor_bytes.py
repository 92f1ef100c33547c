"""A tensor's elements as bytes, a bounded part at a time, wherever they lie."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator

import torch

from parallel_core import ranks
from parallel_core.checkpoint.safetensors_format import SIZES, TensorInfo
from parallel_core.dtypes import dtype_name, lost_number
from parallel_core.errors import CheckpointError
from parallel_core.local_shards import Region

CHUNK = 16 * 2**20
"""Bytes that are in hand at a time: enough to keep a disk busy, and little beside a model."""


def info_of(tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> TensorInfo:
    """Return a tensor's dtype, and its shape or the one given.

    Raises:
        CheckpointError: a file can't hold such a dtype.
    """
    name = dtype_name(tensor.dtype)
    if name not in SIZES or tensor.layout is not torch.strided:
        kind = name if tensor.layout is torch.strided else f"{tensor.layout} {name}"
        raise CheckpointError(f"a tensor of {kind} can't be saved; possible are dense ones of {', '.join(SIZES)}")
    return TensorInfo(name, tuple(tensor.shape) if shape is None else shape)


def dtype_named(name: str) -> torch.dtype:
    """Return `torch.float32` for `float32`."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU, to read and to write; the tensor must be kept alive."""
    nbytes = tensor.numel() * tensor.element_size()
    # Not numpy(): it makes the storage of a tensor one that can't be resized any more, and FSDP1 does so.
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())) if nbytes else memoryview(bytearray())


def in_a_row(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in row-major order, in one dimension: its own memory where they lie so, or a copy."""
    contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not view(-1): a tensor of one element may have any stride and counts as contiguous all the same.
    return contiguous.as_strided((contiguous.numel(),), (1,))


def chunks(name: str, elements: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield elements in a dtype as bytes on the CPU, at most `CHUNK` of them at a time.

    Raises:
        CheckpointError: as `in_dtype`.
    """
    step = max(1, CHUNK // max(elements.element_size(), dtype.itemsize))
    for start in range(0, elements.numel(), step):
        yield ranks.bits(in_dtype(name, elements[start : start + step].cpu(), dtype))


def runs_of(info: TensorInfo, most: int = CHUNK) -> Iterator[Region]:
    """Yield the runs of a tensor, of at most so many bytes, that make up the whole of it in row-major order."""
    numel, step = math.prod(info.shape), max(1, most // SIZES[info.dtype])
    for start in range(0, numel, step):
        yield Region.flat(numel, start, min(step, numel - start))


def in_dtype(name: str, elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return elements in another dtype.

    Raises:
        CheckpointError: there is one that is out of its range.
    """
    if elements.dtype == dtype:
        return elements
    found = elements.to(dtype)
    if lost := lost_number(elements, found):
        raise CheckpointError(f"{name!r} has {lost}; choose another dtype")
    return found
