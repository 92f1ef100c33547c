"""Whether loading can fill a bare model: its tensors have memory, and its state dict shows them and no copies."""

from __future__ import annotations

import torch
from torch import nn

from parallel_core.errors import StateDictError, WrapError
from parallel_core.meta_model import meta_tensors
from parallel_core.record import bare_state, spec_of
from parallel_core.state_dicts import named


def check_can_be_filled(model: nn.Module) -> None:
    """Refuse a bare model into which nothing can be loaded; for a wrapped one, the wrap has seen to it.

    Raises:
        StateDictError: its tensors have no memory, or its state dict has copies of them.
    """
    if on_meta := meta_tensors(model):
        raise StateDictError(
            f"{named('on the meta device', on_meta)}; give the model memory first (model.to_empty(device=...)), or "
            f"wrap it, with state_dict=..."
        )
    if copies := _copied_entries(model):
        raise StateDictError(_told(copies))


def check_no_copies(model: nn.Module) -> None:
    """Refuse to wrap a bare model whose state dict has copies of its tensors.

    Raises:
        WrapError: it has.
    """
    if copies := _copied_entries(model):
        raise WrapError(_told(copies))


def _told(copies: list[str]) -> str:
    return (
        f"{named('copies in the state dict, which can not be filled', copies)}; let the hook that replaces them leave "
        f"the model's own tensors in the state dict, and change a copy of it"
    )


def _copied_entries(model: nn.Module) -> list[str]:
    """Return the names in a bare model's state dict whose tensors are no memory of the model: loading can't fill them.

    A hook of a module's has put copies there, in another dtype, say.
    """
    tensors = [*model.parameters(), *model.buffers()]
    own = {*map(id, tensors), *map(_storage, tensors)}
    return [
        name
        for name, value in bare_state(model).items()
        if spec_of(name, value) is not None and id(value) not in own and _storage(value) not in own
    ]


def _storage(tensor: torch.Tensor) -> tuple[str, int]:
    """Return what a tensor has in common with its views; of one without memory of its own kind, what nothing has."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return ("storage", tensor.untyped_storage()._cdata) if plain else ("tensor", id(tensor))
