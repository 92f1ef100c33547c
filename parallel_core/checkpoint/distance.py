"""How far two tensors are apart: exactly, in every dtype, and with NaN equal to the same NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from parallel_core import ranks

_SIGN = -(2**63)


@dataclass
class Distance:
    """How far the elements of two tensors are apart.

    Attributes:
        largest: the largest absolute difference; NaN where a number stands against NaN.
        count: how many elements differ, if only in the sign of zero.
    """

    largest: float = 0.0
    count: int = 0

    def add(self, one: torch.Tensor, other: torch.Tensor) -> None:
        """Take in more elements of the two tensors, of one dimension each and on the CPU."""
        if one.dtype == other.dtype:
            if torch.equal(ranks.bits(one), ranks.bits(other)):
                return
            differ = _bits_differ(one, other)
        else:
            wider = torch.promote_types(_wide(one.dtype), _wide(other.dtype))
            one, other = one.to(wider), other.to(wider)
            differ = (one != other) & ~(one.isnan() & other.isnan())
        count = int(differ.count_nonzero())
        if count:
            self.count += count
            self._take(_largest(one, other, differ))

    def _take(self, value: float) -> None:
        if math.isnan(value) or value > self.largest:
            self.largest = value


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _bits_differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return for each element whether its bits are others."""
    size = one.element_size()
    if size == 16:
        return (ranks.bits(one).view(-1, size) != ranks.bits(other).view(-1, size)).any(dim=1)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return one.view(whole) != other.view(whole)


def _largest(one: torch.Tensor, other: torch.Tensor, differ: torch.Tensor) -> float:
    """Return the largest absolute difference of those elements of one dtype that differ, whole numbers exactly."""
    if one.is_complex() or one.is_floating_point():
        gaps = (one.to(_wide(one.dtype)) - other.to(_wide(one.dtype))).abs()
        # NaN comes out as the maximum; infinity less infinity is NaN too, and equal.
        return float(gaps.masked_fill_(~differ, 0).max())
    if one.dtype == torch.uint64:  # in the order of signed numbers, which torch computes with
        one, other = one.view(torch.int64) ^ _SIGN, other.view(torch.int64) ^ _SIGN
    one, other = one.to(torch.int64), other.to(torch.int64)
    gaps = torch.maximum(one, other) - torch.minimum(one, other)
    # A gap of 2**63 and more has come out as a negative number.
    wrapped = gaps[gaps < 0]
    return int(wrapped.max()) + 2**64 if wrapped.numel() else int(gaps.max())
