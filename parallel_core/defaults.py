"""The core's answers to every hook that a strategy leaves out.

They are right for a strategy that keeps the whole model on every rank, and for one that replaces parameters by
DTensors in place; they also serve a bare model. torch is imported inside: binding a strategy must not need it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from parallel_core.hookspecs import StateDictType, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallel_core.local_shards import LocalShard
    from parallel_core.meta import MetaStart
    from parallel_core.units import Unit


@hookimpl
def applies(world_size: int) -> bool:
    return world_size > 1


@hookimpl
def plan_units() -> list[Unit]:
    return []


@hookimpl
def check_model() -> list[str]:
    return []


@hookimpl
def wrap_meta_model(model: nn.Module, start: MetaStart) -> nn.Module:
    return start.wrap_model(start.materialise(model))


@hookimpl
def wrap_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


@hookimpl
def settle() -> None:
    return None


@hookimpl
def model_state_dict(model: nn.Module, state_dict_type: StateDictType) -> dict[str, Any]:
    from parallel_core import ranks, tensors
    from parallel_core.record import bare_state, inner_module

    state = bare_state(inner_module(model))
    entries = {name: tensors.entry(value, state_dict_type) for name, value in state.items()}
    return {} if state_dict_type is StateDictType.FULL and ranks.rank() else entries


@hookimpl
def load_model_state_dict(model: nn.Module, state_dict: dict[str, Any], state_dict_type: StateDictType) -> None:
    from parallel_core import tensors
    from parallel_core.names import bare_names
    from parallel_core.record import bare_state, inner_module, spec_of

    inner = inner_module(model)
    state = bare_state(inner)
    for name, value in state_dict.items():
        if spec_of(name, state[name]) is not None:
            tensors.assign(state[name], value, state_dict_type)
    bare = bare_names(inner)
    own = {
        name: state_dict[bare(name)]
        for name, value in inner.state_dict(keep_vars=True).items()
        if spec_of(name, value) is None and bare(name) in state_dict
    }
    if own:
        inner.load_state_dict(own, strict=False)  # hands extra state to the modules that it belongs to


@hookimpl
def optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict_type: StateDictType
) -> dict[str, Any]:
    from parallel_core import ranks, tensors
    from parallel_core.optimizer_state import named_groups
    from parallel_core.record import bare_parameters

    parameters = bare_parameters(model)
    state = {
        name: {key: tensors.entry(value, state_dict_type) for key, value in optimizer.state[parameter].items()}
        for name, parameter in parameters.items()
        if parameter in optimizer.state
    }
    if state_dict_type is StateDictType.FULL and ranks.rank():
        return {}
    return {"state": state, "param_groups": named_groups(optimizer, parameters)}


@hookimpl
def load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], state_dict_type: StateDictType
) -> None:
    from parallel_core import tensors
    from parallel_core.optimizer_state import load_named_state
    from parallel_core.record import bare_parameters

    parameters = bare_parameters(model)
    state = {
        name: {key: tensors.placed(value, parameters[name], state_dict_type) for key, value in entries.items()}
        for name, entries in state_dict["state"].items()
    }
    load_named_state(optimizer, parameters, state, state_dict["param_groups"])


@hookimpl
def local_shards(model: nn.Module) -> dict[str, LocalShard]:
    from parallel_core.local_shards import LocalShard
    from parallel_core.record import bare_state, inner_module, spec_of

    state = bare_state(inner_module(model))
    return {name: LocalShard.of(value) for name, value in state.items() if spec_of(name, value) is not None}


@hookimpl
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    import torch

    from parallel_core import norms
    from parallel_core.errors import TrainingError
    from parallel_core.tensors import is_dtensor

    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if any(gradient.is_sparse for gradient in gradients):
        raise TrainingError("there are sparse gradients, whose norm torch can't take; set sparse=False, or do not clip")
    if norms.needs_care(gradients, norm_type):
        return norms.clip(gradients, max_norm, norm_type)
    # A list: of a model without parameters torch warns where it gets a generator.
    norm = torch.nn.utils.clip_grad_norm_(list(model.parameters()), max_norm, norm_type)
    return norm.full_tensor() if is_dtensor(norm) else norm


@hookimpl
def no_sync() -> AbstractContextManager[None]:
    return nullcontext()


@hookimpl
def has_unsynchronised_gradients() -> bool:
    return False


@hookimpl
def grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    import torch

    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return torch.amp.GradScaler(device, enabled=False)


@hookimpl
def data_parallel() -> tuple[int, int]:
    from parallel_core import ranks

    return ranks.rank(), ranks.world_size()
