"""What rank 0 tells the other ranks of its full state dict ahead of the tensors: all of it but their values."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from parallel_core import ranks
from parallel_core.errors import StateDictError
from parallel_core.hookspecs import StateDictType
from parallel_core.record import Layout, TensorSpec


def entries_to_load(
    layout: Layout, state_dict: Any, state_dict_type: StateDictType, missing: Iterable[str]
) -> dict[str, Any]:
    """Return the entries that a strategy loads, of the same structure on every rank; a collective under `full`.

    Under `full` the ranks other than 0 hold meta tensors; entries that are no tensors are rank 0's on every rank.
    """
    skipped = set(missing)
    names = [name for name in layout.entries if name not in skipped]
    if state_dict_type is StateDictType.SHARDED or ranks.world_size() == 1:
        return {name: state_dict[name] for name in names}
    outline = None
    if ranks.rank() == 0:
        # Not the model's own shapes and dtypes: where a cast is asked for, what rank 0 sends has another dtype.
        outline = {
            name: state_dict[name] if layout.entries[name] is None else outlined(state_dict[name]) for name in names
        }
    outline = sent(outline)
    return {name: state_dict[name] if ranks.rank() == 0 else on_meta(outline[name]) for name in names}


def unsendable(where: str, value: Any, state_dict_type: StateDictType) -> Iterator[str]:
    """Yield why a value that is no tensor can't be handed from rank 0 to the others, if it has to be."""
    if state_dict_type is StateDictType.FULL and ranks.world_size() > 1:
        try:
            pickle.dumps(value)
        except Exception as error:  # whatever a strange object raises
            yield f"{where}: can't be sent to the other ranks by pickle: {type(error).__name__}: {error}"


def sent(outline: Any) -> Any:
    """Return rank 0's outline of a state dict on every rank; a collective.

    Raises:
        StateDictError: a rank can't make of it what rank 0 has; the same error on every rank.
    """
    packed = ranks.broadcast(pickle.dumps(outline) if ranks.rank() == 0 else None)
    with ranks.agreement(StateDictError):
        return pickle.loads(packed)  # noqa: S301  # from this program's rank 0


def outlined(value: Any) -> Any:
    """Return a `TensorSpec` for a tensor, which is small enough to be sent, and anything else as it is."""
    return TensorSpec(tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def on_meta(value: Any) -> Any:
    """Return a meta tensor for a `TensorSpec`, and anything else as it is."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if isinstance(value, TensorSpec) else value
