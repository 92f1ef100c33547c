"""The names of dtypes, and the numbers that have no place in one."""

from __future__ import annotations

import torch

__all__ = ["dtype_name", "lost_number"]


def lost_number(elements: torch.Tensor, found: torch.Tensor) -> str | None:
    """Return a number that a conversion of floating point or complex numbers has lost, in words, or None.

    Args:
        elements: what was converted.
        found: what it was converted to, of the same shape.
    """
    dtype = found.dtype
    # Most often there is none, and looked at again are the few alone.
    suspect = _out_of_range(elements, dtype) if dtype.itemsize == 1 else found.isinf()
    if not bool(suspect.any()):
        return None
    wide = torch.complex128 if dtype.is_complex else torch.float64
    before, after = elements[suspect].to(wide), found[suspect].to(wide)
    lost = before != after
    if not bool(lost.any()):
        return None
    limits = torch.finfo(dtype)
    return f"{before[lost][0].item():g}, and {dtype_name(dtype)} goes from {limits.min:g} to {limits.max:g}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def _out_of_range(elements: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # For float8: some of its kinds have no infinity, and stop at their largest number or turn into NaN (torch 2.13).
    wide, limits = elements if elements.element_size() >= 4 else elements.to(torch.float32), torch.finfo(dtype)
    return (wide > limits.max) | (wide < limits.min)
