"""The strategy `fsdp`: parameters, gradients and optimizer state in shards, by `FullyShardedDataParallel` (FSDP1).

This module holds the settings and the hooks; `wrapping` makes the wrapped model; `model_state` and `optimizer_state`
read and load it, a unit or a parameter at a time; `pieces` tells which part of each parameter a rank has.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from parallel_core import StateDictType, hookimpl
from parallel_core.sharding_config import ShardingConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallel_core.local_shards import LocalShard
    from parallel_core.meta import MetaStart
    from parallel_core.units import Unit

__all__ = ["FSDPConfig"]


class FSDPConfig(ShardingConfig):
    """The settings of `fsdp`: those of `parallel_core.sharding_config.ShardingConfig`."""


@hookimpl
def strategy_config() -> type[FSDPConfig]:
    return FSDPConfig


@hookimpl
def plan_units(model: nn.Module, config: FSDPConfig) -> list[Unit]:
    from parallel_core import sharding

    return sharding.plan(model, config)


@hookimpl
def check_model(model: nn.Module, config: FSDPConfig, device: torch.device) -> list[str]:
    from parallel_core_fsdp import wrapping

    return list(wrapping.problems(model, config, device))


@hookimpl
def wrap_model(model: nn.Module, config: FSDPConfig, device: torch.device) -> nn.Module:
    from parallel_core_fsdp import wrapping

    return wrapping.wrap(model, config, device)


@hookimpl
def wrap_meta_model(model: nn.Module, config: FSDPConfig, device: torch.device, start: MetaStart) -> nn.Module:
    from parallel_core_fsdp import wrapping

    return wrapping.wrap_meta(model, config, device, start)


@hookimpl
def settle(model: nn.Module) -> None:
    from parallel_core_fsdp import stepping

    stepping.settle(model)


@hookimpl
def model_state_dict(model: nn.Module, state_dict_type: StateDictType) -> dict[str, Any]:
    from parallel_core_fsdp import model_state

    return model_state.read(model, state_dict_type)


@hookimpl
def load_model_state_dict(model: nn.Module, state_dict: dict[str, Any], state_dict_type: StateDictType) -> None:
    from parallel_core_fsdp import model_state

    model_state.load(model, state_dict, state_dict_type)


@hookimpl
def optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict_type: StateDictType
) -> dict[str, Any]:
    from parallel_core_fsdp import optimizer_state

    return optimizer_state.read(model, optimizer, state_dict_type)


@hookimpl
def load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], state_dict_type: StateDictType
) -> None:
    from parallel_core_fsdp import optimizer_state

    optimizer_state.load(model, optimizer, state_dict, state_dict_type)


@hookimpl
def local_shards(model: nn.Module) -> dict[str, LocalShard]:
    from parallel_core_fsdp import pieces

    return pieces.local_shards(model)


@hookimpl
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    from parallel_core_fsdp import stepping

    return stepping.clip_grad_norm(model, max_norm, norm_type)


@hookimpl
def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    from parallel_core_fsdp import stepping

    return stepping.no_sync(model)


@hookimpl
def has_unsynchronised_gradients(model: nn.Module) -> bool:
    from parallel_core_fsdp import stepping

    return stepping.has_unsynchronised_gradients(model)


@hookimpl
def grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    from parallel_core_fsdp import stepping

    return stepping.grad_scaler(model)
