"""The other objects that a checkpoint is loaded into, by name: their states are read first, and put in all or none."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from parallel_core import ranks
from parallel_core.checkpoint.opening import Saved
from parallel_core.checkpoint.reading import SavedReader
from parallel_core.checkpoint.tensor_bytes import dtype_named
from parallel_core.checkpoint.tree import decode
from parallel_core.errors import CheckpointError
from parallel_core.local_shards import LocalShard
from parallel_core.tensors import is_dtensor


@dataclass(frozen=True)
class ObjectStates:
    """The states of objects, by name.

    Attributes:
        before: what the objects have, as copies.
        saved: what they are to get. A DTensor in the one is a DTensor in the other, of which this rank has its part.
    """

    before: dict[str, Any]
    saved: dict[str, Any]


def object_states(saved: Saved, objects: Mapping[str, Any], reader: SavedReader) -> ObjectStates:
    """Read the states of objects; changes nothing.

    Raises:
        CheckpointError: one was not saved, or can't be loaded into, or a file is damaged.
    """
    section = saved.manifest.objects
    there = section.values or {}
    for name, thing in objects.items():
        if name not in there:
            listed = ", ".join(map(repr, there)) or "none"
            raise CheckpointError(f"{saved.place} has no state of objects[{name!r}]; saved are: {listed}")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(thing, method, None)):
                raise CheckpointError(f"objects[{name!r}] has no {method}(): found {type(thing).__name__}")

    def read(name: str, now: Any) -> torch.Tensor:
        info = section.tensors[name]
        if not is_dtensor(now) or tuple(now.shape) != info.shape:
            return reader.whole(name, info)
        target = torch.empty_like(now, dtype=dtype_named(info.dtype), requires_grad=False)
        reader.fill(LocalShard.of(target), name, info)
        return target

    before = {name: thing.state_dict() for name, thing in objects.items()}
    states = {name: _read(decode(there[name], _Name), now, read) for name, now in before.items()}
    return ObjectStates(copy.deepcopy(before), states)


class _Name(str):
    """The name of a tensor, in its place in a state."""


def _read(state: Any, now: Any, read: Callable[[str, Any], torch.Tensor]) -> Any:
    """Return a state with its tensors, each read with what stands in the same place of the state as it is now."""
    if isinstance(state, _Name):
        return read(str(state), now)
    if isinstance(state, dict):
        there = now if isinstance(now, Mapping) else {}
        found = {key: _read(value, there.get(key), read) for key, value in state.items()}
        return Counter(found) if isinstance(state, Counter) else found
    if isinstance(state, list | tuple):
        items = now if isinstance(now, list | tuple) and len(now) == len(state) else [None] * len(state)
        return type(state)(_read(value, item, read) for value, item in zip(state, items, strict=True))
    return state


@contextmanager
def objects_loaded(objects: Mapping[str, Any], states: ObjectStates) -> Iterator[None]:
    """Load objects before the block; if one fails, or the block does, all of them get back what they had.

    Raises:
        CheckpointError: one failed; the same error on every rank.
    """
    try:
        with ranks.agreement(CheckpointError):
            for name, thing in objects.items():
                state = states.saved[name]
                if isinstance(state, dict) and not state:
                    continue  # a gradient scaler that was disabled when it was saved, say; an enabled one refuses it
                try:
                    thing.load_state_dict(state)
                except Exception as error:
                    raise CheckpointError(
                        f"objects[{name!r}] ({type(thing).__name__}) does not take the state that was saved: "
                        f"{type(error).__name__}: {error}"
                    ) from error
        yield
    except BaseException:
        for name, thing in objects.items():
            with suppress(Exception):  # one that takes nothing at all has changed nothing either
                thing.load_state_dict(states.before[name])
        raise
