"""The strategy `fsdp2`: parameters, gradients and optimizer state as DTensors in shards, by `fully_shard`.

This module holds the settings and the hooks; `wrapping` makes the wrapped model, of whose classes `class_checks` looks
whether they allow it; `stepping` and `whole_gradients` serve the training step.
State dicts are the core's defaults, which know DTensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from parallel_core import hookimpl
from parallel_core.sharding_config import ShardingConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallel_core.meta import MetaStart
    from parallel_core.units import Unit

__all__ = ["FSDP2Config"]


class FSDP2Config(ShardingConfig):
    """The settings of `fsdp2`: those of `parallel_core.sharding_config.ShardingConfig`, and two more.

    Attributes:
        reshard_after_forward: free a unit's gathered parameters after its forward and gather them again for its
            backward. By default torch's way: yes, but for the root, which is needed first in the backward; and no with
            `sharding = "grad_op"`. True does it for the root too, and False for none.
        reduce_unused_parameters: give each parameter that a rank does not use in a step a gradient of zero, so that the
            ranks may use different ones.
    """

    reshard_after_forward: bool | None = None
    reduce_unused_parameters: bool = False

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.sharding == "grad_op" and self.reshard_after_forward:
            yield (
                "reshard_after_forward = true contradicts sharding = 'grad_op', which keeps parameters until the "
                "backward; leave one of them out"
            )


@hookimpl
def strategy_config() -> type[FSDP2Config]:
    return FSDP2Config


@hookimpl
def plan_units(model: nn.Module, config: FSDP2Config) -> list[Unit]:
    from parallel_core import sharding

    return sharding.plan(model, config)


@hookimpl
def check_model(model: nn.Module, config: FSDP2Config, device: torch.device) -> list[str]:
    from parallel_core_fsdp2 import wrapping

    return list(wrapping.problems(model, config, device))


@hookimpl
def wrap_model(model: nn.Module, config: FSDP2Config, device: torch.device) -> nn.Module:
    from parallel_core_fsdp2 import wrapping

    return wrapping.wrap(model, config, device)


@hookimpl
def wrap_meta_model(model: nn.Module, config: FSDP2Config, device: torch.device, start: MetaStart) -> nn.Module:
    from parallel_core_fsdp2 import wrapping

    return wrapping.wrap_meta(model, config, device, start)


@hookimpl
def wrap_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    from parallel_core_fsdp2 import whole_gradients

    whole_gradients.zero_with_optimizer(model, optimizer)
    return optimizer


@hookimpl
def settle(model: nn.Module) -> None:
    from parallel_core_fsdp2 import stepping

    stepping.reshard(model)


@hookimpl
def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    from parallel_core_fsdp2 import stepping

    return stepping.no_sync(model)


@hookimpl
def has_unsynchronised_gradients(model: nn.Module) -> bool:
    from parallel_core_fsdp2 import whole_gradients

    return whole_gradients.are_there(model)


@hookimpl
def grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    from parallel_core_fsdp2 import stepping

    return stepping.grad_scaler(model)
