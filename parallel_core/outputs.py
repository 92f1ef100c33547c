"""The tensors in what a forward returns, however they are packed: what DistributedDataParallel and FSDP look into."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples, dicts, dataclasses and whatever else torch's pytree knows, however deep."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif _is_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Return the same structure with other tensors in it; dataclasses are copied.

    Args:
        function: returns what takes a tensor's place, which may be the tensor itself.
        output: as `tensors_in` takes it.
    """

    def mapped(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if not _is_dataclass(leaf):
            return leaf
        # Not dataclasses.replace: __init__ may want other arguments, or do more than keep them.
        changed = copy.copy(leaf)
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):
                object.__setattr__(changed, field.name, map_tensors(function, getattr(leaf, field.name)))
        return changed

    return tree_map(mapped, output)


def _is_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
