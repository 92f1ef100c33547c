"""The tensors in what a forward returns, however they are packed: at least as DistributedDataParallel and FSDP look."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["map_tensors", "tensors_in"]


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples, dicts, dataclasses and whatever else torch's pytree knows, however deep."""
    return _tensors_in(output, set())


def _tensors_in(output: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif id(leaf) not in seen:
            seen.add(id(leaf))  # one may refer to itself
            for inner in _parts(leaf):
                yield from _tensors_in(inner, seen)


def _parts(leaf: Any) -> list[Any]:
    """Return what is in something that pytree takes for one thing: of its own kinds it knows no subclasses."""
    if isinstance(leaf, Mapping):
        return list(leaf.values())
    if isinstance(leaf, list | tuple | set | frozenset):
        return list(leaf)
    return list(_attributes(leaf).values())


def _attributes(leaf: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        names = [field.name for field in dataclasses.fields(leaf)]
    else:
        names = list(vars(leaf)) if isinstance(leaf, SimpleNamespace) else []
    return {name: getattr(leaf, name) for name in names if hasattr(leaf, name)}


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Return the same structure with other tensors in it; dataclasses in which one changes are copied.

    Args:
        function: returns what takes a tensor's place, which may be the tensor itself.
        output: lists, tuples, dicts, dataclasses and whatever else torch's pytree knows.
    """
    return tree_map(partial(_mapped, function, {}), output)


# No function inside of map_tensors: one that refers to itself would keep the tensors until the next garbage collection.
def _mapped(function: Callable[[torch.Tensor], torch.Tensor], made: dict[int, Any], leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return function(leaf)
    if id(leaf) in made:
        return made[id(leaf)]
    made[id(leaf)] = leaf  # until it is made: it may refer to itself
    attributes = _attributes(leaf)
    others = {name: tree_map(partial(_mapped, function, made), value) for name, value in attributes.items()}
    if all(others[name] is value for name, value in attributes.items()):
        return leaf
    # Not dataclasses.replace: __init__ may want other arguments, or do more than keep them.
    changed = copy.copy(leaf)
    for name, value in others.items():
        object.__setattr__(changed, name, value)
    made[id(leaf)] = changed
    return changed
