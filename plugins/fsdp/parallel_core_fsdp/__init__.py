"""The strategy `fsdp`: parameters, gradients and optimizer state in shards, by `FullyShardedDataParallel` (FSDP1).

This module holds the settings and the hooks; `wrapping` makes the wrapped model, `model_state` and `optimizer_state`
read and load it, a unit or a parameter at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta

from parallel_core import StateDictType, StrategyConfig, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallel_core.meta import MetaStart
    from parallel_core.units import Unit

__all__ = ["FSDPConfig"]


class FSDPConfig(StrategyConfig):
    """The settings of `fsdp`.

    Attributes:
        mixed_precision: the dtype of computation and of gradient reduction. Parameters, optimizer state and state dicts
            keep the dtype of the bare model, and `fp32` means no casting at all.
        auto_wrap_min_params: a module with at least this many parameters that are not in an inner unit becomes a unit;
            see `parallel_core.units.choose_units`.
        cpu_offload: keep parameters and gradients on the CPU while they are not needed; needs an accelerator.
        sync_module_states: take the initial values from rank 0; otherwise they are compared, and must be the same.
    """

    mixed_precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    auto_wrap_min_params: Annotated[int, Meta(ge=0)] = 10_000_000
    cpu_offload: bool = False
    sync_module_states: bool = True

    def lost_if_declined(self) -> Iterator[str]:
        if self.mixed_precision != "fp32":
            yield "mixed_precision"
        if self.cpu_offload:
            yield "cpu_offload"


@hookimpl
def strategy_config() -> type[FSDPConfig]:
    return FSDPConfig


@hookimpl
def plan_units(model: nn.Module, config: FSDPConfig) -> list[Unit]:
    from parallel_core_fsdp import wrapping

    return wrapping.plan(model, config)


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
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    from parallel_core_fsdp import stepping

    return stepping.clip_grad_norm(model, max_norm, norm_type)


@hookimpl
def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    from parallel_core_fsdp import stepping

    return stepping.no_sync(model)


@hookimpl
def grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    from parallel_core_fsdp import stepping

    return stepping.grad_scaler(model)
