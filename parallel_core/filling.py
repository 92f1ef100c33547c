"""Whether a model can be read and filled: its tensors have memory, and its state dict shows them and no copies."""

from __future__ import annotations

import torch
from torch import nn

from parallel_core.errors import StateDictError, WrapError
from parallel_core.hookspecs import StateDictType
from parallel_core.meta_model import meta_tensors
from parallel_core.record import Record, bare_state, has_extra_state, inner_module, spec_of
from parallel_core.state_dicts import named
from parallel_core.tensors import entry, storage


def check_can_be_read(model: nn.Module, record: Record | None) -> None:
    """Refuse a model that has no values.

    Args:
        model: the model.
        record: the record of a wrapped one, which has them.

    Raises:
        StateDictError: its tensors have no memory.
    """
    if record is None and (on_meta := meta_tensors(model)):
        raise StateDictError(
            f"{named('on the meta device, without values to read', on_meta)}; give the model values first: load a "
            f"state dict, or wrap it"
        )


def check_extra_state(model: nn.Module) -> None:
    """Refuse a model with a module whose extra state can't be had, before other ranks wait for this one.

    Raises:
        StateDictError: a module fails to give it, or it can't be copied.
    """
    for module in inner_module(model).modules():
        if has_extra_state(module):
            try:
                value = module.get_extra_state()
            except Exception as error:  # it is the user's own
                raise StateDictError(
                    f"get_extra_state() of {type(module).__name__} failed: {type(error).__name__}: {error}"
                ) from error
            entry(value, StateDictType.SHARDED)


def check_can_be_filled(model: nn.Module, record: Record | None) -> None:
    """Refuse a model into which nothing can be loaded.

    Args:
        model: the model.
        record: the record of a wrapped one, of which the wrap has seen to most.

    Raises:
        StateDictError: its tensors have no memory, or its state dict has copies of them, or one was made under
            `torch.inference_mode()`.
    """
    if not torch.is_inference_mode_enabled():
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if fixed := [name for name, tensor in tensors.items() if tensor.is_inference()]:
            raise StateDictError(
                f"{named('made under torch.inference_mode(), and not to be written outside of it', fixed)}; make them "
                f"outside of it, or load under it"
            )
    if record is not None:
        return
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
        f"{named('in the state dict, and no tensors of the model, so that nothing can be loaded into them', copies)}; "
        f"let the hook that puts copies there leave the model's own, and return other values from get_extra_state"
    )


def _copied_entries(model: nn.Module) -> list[str]:
    """Return the names in a bare model's state dict whose tensors are no memory of the model: loading can't fill them.

    A hook of a module's has put copies there, in another dtype, say.
    """
    tensors = [*model.parameters(), *model.buffers()]
    own = {*map(id, tensors), *map(storage, tensors)}
    return [
        name
        for name, value in bare_state(model).items()
        if spec_of(name, value) is not None and id(value) not in own and storage(value) not in own
    ]
