"""What the settings of a sharding strategy come to: the units, the dtypes, the mesh, the values to start from.

For strategy authors, with a config that is a `parallel_core.sharding_config.ShardingConfig`. What speaks against a wrap
is in `sharding_checks`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.modules.batchnorm import _BatchNorm

from parallel_core import ranks
from parallel_core.names import unwrapped
from parallel_core.outputs import map_tensors
from parallel_core.recomputation import recompute_units
from parallel_core.sharding_config import ShardingConfig
from parallel_core.units import Unit, choose_units, describe_no_units

__all__ = [
    "ChosenUnit",
    "chosen_units",
    "device_mesh",
    "dtypes",
    "plan",
    "return_no_views",
    "shard_size",
    "start_alike",
    "stays_uncast",
    "values_of_unit",
]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def plan(model: nn.Module, config: ShardingConfig) -> list[Unit]:
    """Return the units of the bare model, without the root; the answer to the hook `plan_units`."""
    return choose_units(
        model,
        config.auto_wrap_min_params,
        classes=config.wrap_layers,
        always=lambda module: stays_uncast(module, config),
    )


def stays_uncast(module: nn.Module, config: ShardingConfig) -> bool:
    """Return whether a module is a unit of its own because its parameters must keep their dtype."""
    # A batch norm takes low-precision input beside full-precision weights and statistics, and nothing else.
    return config.mixed_precision != "fp32" and isinstance(unwrapped(module), _BatchNorm)


class ChosenUnit(NamedTuple):
    """What is chosen for a module that becomes a unit.

    Attributes:
        name: its name in the bare model.
        dtypes: those of computation and of gradient reduction; None where nothing is cast.
    """

    name: str
    dtypes: tuple[torch.dtype | None, torch.dtype | None]


def chosen_units(
    model: nn.Module, config: ShardingConfig, strategy: str, logger: logging.Logger
) -> dict[nn.Module, ChosenUnit]:
    """Return the modules that are to become units, without the root, in the order of the model's modules.

    With `activation_checkpointing` they are put into wrappers that recompute: the model is changed in place, and the
    wrappers are what is returned. Where there are no units, rank 0 warns that no memory is saved.

    Args:
        model: the bare model.
        config: the settings.
        strategy: the strategy's name, the prefix of the settings in the warning.
        logger: the strategy's own, to warn with.
    """
    units = plan(model, config)
    if not units and ranks.rank() == 0 and next(model.parameters(), None) is not None:
        logger.warning(describe_no_units(model, f"{strategy}_auto_wrap_min_params", config.auto_wrap_min_params))
    cast = dtypes(config)
    # What is not cast is not reduced in a lower dtype either, unless that was asked for by itself.
    uncast = (None, None if config.reduce_precision is None else cast[1])
    chosen = [ChosenUnit(unit.name, uncast if stays_uncast(unit.module, config) else cast) for unit in units]
    modules = recompute_units(model, units) if config.activation_checkpointing else [unit.module for unit in units]
    return dict(zip(modules, chosen, strict=True))


def start_alike(tensors: Mapping[str, torch.Tensor], config: ShardingConfig, strategy: str) -> None:
    """Take rank 0's values or compare them, as `sync_module_states` says; see `parallel_core.ranks.start_alike`."""
    ranks.start_alike(tensors, broadcast=config.sync_module_states, field=f"{strategy}_sync_module_states")


def dtypes(config: ShardingConfig) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes of computation and of gradient reduction; None where nothing is cast."""
    computed = None if config.mixed_precision == "fp32" else DTYPES[config.mixed_precision]
    return computed, computed if config.reduce_precision is None else DTYPES[config.reduce_precision]


def device_mesh(config: ShardingConfig, device: torch.device) -> DeviceMesh:
    """Return the mesh to shard over; a collective. `hybrid` has two dimensions, `replicate` and `shard`."""
    if config.sharding != "hybrid":
        return init_device_mesh(device.type, (ranks.world_size(),), mesh_dim_names=("shard",))
    size = shard_size(config)
    shape = (ranks.world_size() // size, size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


def shard_size(config: ShardingConfig) -> int:
    """Return over how many ranks `hybrid` shards; 0 where nothing says so."""
    # torchrun tells each rank how many of them stand on its machine.
    return config.hybrid_shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", "0"))


def values_of_unit(module: nn.Module, name: str, wrapper: type, *, loads: bool) -> dict[str, torch.Tensor]:
    """Return what a unit that was made from the meta device holds, outside of the units inside of it, by bare name.

    Args:
        module: the unit's module.
        name: its name in the bare model; empty for the root.
        wrapper: the class by which the units that are finished can be told.
        loads: whether a state dict is loaded afterwards, as `MetaStart.loads` tells; what it has is left out then.
    """
    module = unwrapped(module)
    lacking = module._non_persistent_buffers_set if loads else module._buffers
    found: dict[str, torch.Tensor] = {
        path: buffer for path, buffer in module.named_buffers(name, recurse=False) if path.rpartition(".")[2] in lacking
    }
    if not loads:
        found |= module.named_parameters(name, recurse=False)
    for child_name, child in module.named_children():
        if not isinstance(child, wrapper):
            found |= values_of_unit(child, f"{name}.{child_name}" if name else child_name, wrapper, loads=loads)
    return found


def return_no_views(module: nn.Module) -> None:
    """Let a module that becomes a unit return a copy in place of each view; to be called before it is wrapped.

    What gathers a unit for its backward hangs on what the unit returns. Where that is a view, an operation in place on
    it (`x += y`) drops the hook: torch then fails, or gives wrong gradients without a word. Linear layers return views.
    """
    module.register_forward_hook(lambda module, args, output: _without_views(output))


def _without_views(output: Any) -> Any:
    if not torch.is_grad_enabled():
        return output
    return map_tensors(lambda tensor: tensor.clone() if tensor.requires_grad and tensor._is_view() else tensor, output)
