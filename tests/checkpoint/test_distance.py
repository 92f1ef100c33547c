"""How far tensors are apart: in every dtype, exactly for whole numbers, and by bits for what has no number."""

from __future__ import annotations

import math

import pytest
import torch

from parallel_core.checkpoint.distance import Distance
from parallel_core.checkpoint.safetensors_format import SIZES


def distance(one: torch.Tensor, other: torch.Tensor) -> tuple[float, int]:
    found = Distance()
    found.add(one, other)
    return found.largest, found.count


@pytest.mark.parametrize("name", SIZES)
def test_every_dtype_has_a_distance(name: str) -> None:
    dtype = getattr(torch, name)
    one = torch.tensor([0, 1, 1]).to(torch.float32).to(dtype)
    other = torch.tensor([0, 1, 0]).to(torch.float32).to(dtype)
    gap = (one[2].to(torch.complex128) - other[2].to(torch.complex128)).abs().item()  # one has no zero
    assert distance(one, other) == (gap, 1)
    assert distance(one, one.clone()) == (0, 0)


@pytest.mark.parametrize(
    ("one", "other", "dtype"),
    [
        (2**53, 2**53 + 1, torch.int64),
        (-(2**63), 2**63 - 1, torch.int64),
        (0, 2**64 - 1, torch.uint64),
        (2**63 - 1, 2**63, torch.uint64),
        (-128, 127, torch.int8),
        (0, 2**32 - 1, torch.uint32),
        (False, True, torch.bool),
    ],
)
def test_whole_numbers_are_exact(one: int, other: int, dtype: torch.dtype) -> None:
    found = distance(torch.tensor([one, 1], dtype=dtype), torch.tensor([other, 1], dtype=dtype))
    assert found == (abs(int(other) - int(one)), 1)


def test_equal_bits_are_equal_whatever_they_stand_for() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    assert distance(values, values.clone()) == (0, 0)
    mixed = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert distance(values, mixed) == (1, 1)


def test_nan_is_the_largest_difference_and_infinity_is_next() -> None:
    zero = torch.zeros(3)
    assert distance(zero, torch.tensor([0, math.inf, 1])) == (math.inf, 2)
    largest, count = distance(zero, torch.tensor([math.nan, math.inf, 1]))
    assert math.isnan(largest)
    assert count == 3
    found = Distance()
    found.add(zero, torch.tensor([math.nan, 0, 0]))
    found.add(zero, torch.ones(3))
    assert math.isnan(found.largest)
    assert found.count == 4


def test_the_sign_of_zero_is_a_difference_of_nothing() -> None:
    assert distance(torch.zeros(2), torch.tensor([0.0, -0.0])) == (0, 1)


def test_two_dtypes_are_compared_as_numbers() -> None:
    one = torch.tensor([1.0, math.nan, math.inf, 0.5])
    assert distance(one, one.to(torch.bfloat16)) == (0, 0)
    assert distance(torch.tensor([1, 2]), torch.tensor([1.0, 2.5])) == (0.5, 1)
    assert distance(torch.tensor([1 + 1j]), torch.tensor([1.0])) == (1, 1)
