"""What the settings of a sharding strategy come to: the units, the dtypes, the mesh, and what can't be done.

For strategy authors: with a config that is a `parallel_core.sharding_config.ShardingConfig`, these are most of the
hooks `plan_units` and `check_model`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from parallel_core import ranks
from parallel_core.names import bare_names, unwrapped
from parallel_core.sharding_config import ShardingConfig
from parallel_core.units import Unit, choose_units, describe_no_units, layer_problems, root_unit

__all__ = [
    "device_mesh",
    "dtypes",
    "no_units_warning",
    "plan",
    "problems",
    "return_no_views",
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


def dtypes(config: ShardingConfig) -> tuple[torch.dtype | None, torch.dtype | None]:
    """Return the dtypes of computation and of gradient reduction; None where nothing is cast."""
    computed = None if config.mixed_precision == "fp32" else DTYPES[config.mixed_precision]
    return computed, computed if config.reduce_precision is None else DTYPES[config.reduce_precision]


def device_mesh(config: ShardingConfig, device: torch.device) -> DeviceMesh:
    """Return the mesh to shard over; a collective. `hybrid` has two dimensions, `replicate` and `shard`."""
    if config.sharding != "hybrid":
        return init_device_mesh(device.type, (ranks.world_size(),), mesh_dim_names=("shard",))
    size = _shard_size(config)
    shape = (ranks.world_size() // size, size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))


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
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.clone() if tensor.requires_grad and tensor._is_view() else tensor, output
    )


def no_units_warning(model: nn.Module, config: ShardingConfig, strategy: str) -> str:
    """Return the warning for a model of which `plan` makes no units; `strategy` is the prefix of the settings."""
    return describe_no_units(model, f"{strategy}_auto_wrap_min_params", config.auto_wrap_min_params)


def problems(
    model: nn.Module,
    config: ShardingConfig,
    device: torch.device,
    strategy: str,
    *,
    one_dtype: bool = True,
    empty: bool = True,
    contiguous: bool = False,
) -> Iterator[str]:
    """Yield what would make the wrap, or the first step, fail; the answer to the hook `check_model`.

    Args:
        model: the bare model.
        config: the settings.
        device: where this rank trains.
        strategy: the strategy's name, the prefix of the settings in the messages.
        one_dtype: whether all parameters of a unit must have one dtype; otherwise those that train must.
        empty: whether a parameter may have no elements.
        contiguous: whether a parameter must be contiguous.
    """
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel | DistributedDataParallel | FSDPModule):
            yield f"{name or 'the model'!r} is a {type(module).__name__} already; pass the bare model"
            return
    root = unwrapped(model)
    if type(root).forward is nn.Module.forward and "forward" not in vars(root):
        yield f"the model is a {type(root).__name__}, which has no forward; wrap the module that calls its parts"
    yield from _setting_problems(config, device, strategy)
    yield from _checkpointing_problems(model, config, strategy)
    yield from layer_problems(model, config.wrap_layers, f"{strategy}_wrap_layers")
    yield from _parameter_problems(model, device, strategy, empty=empty, contiguous=contiguous)
    units = plan(model, config)
    for unit in (*units, root_unit(model, units)):
        by_dtype: dict[torch.dtype, str] = {}
        for name, parameter in unit.parameters.items():
            if one_dtype or parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, name)
        if len(by_dtype) > 1:
            found = " and ".join(f"{_named(dtype)} ({name!r})" for dtype, name in by_dtype.items())
            where = f"unit {unit.name!r}" if unit.name else "the root unit"
            yield (
                f"{where} has parameters of {found}, and {strategy} handles one dtype at a time; convert the model to "
                f"one, or make a unit of each part with {strategy}_wrap_layers"
            )


def _setting_problems(config: ShardingConfig, device: torch.device, strategy: str) -> Iterator[str]:
    if config.cpu_offload and device.type == "cpu":
        yield (
            f"{strategy}_cpu_offload keeps parameters on the CPU while an accelerator computes, and this rank trains "
            f"on {device}; set {strategy}_cpu_offload = false"
        )
    elif config.cpu_offload and "cpu" not in _served_devices():
        yield (
            f"{strategy}_cpu_offload needs a process group that serves tensors on the CPU, found {_backends()!r}; make "
            f"it with the backend 'cpu:gloo,{_backends()}', as process_group does"
        )
    if config.sharding == "hybrid":
        world_size, size = ranks.world_size(), _shard_size(config)
        where = f"{strategy}_hybrid_shard_size"
        if config.hybrid_shard_size is None and size < 2:
            yield (
                f"{strategy}_sharding = 'hybrid' shards over the ranks of one machine, and LOCAL_WORLD_SIZE is "
                f"{os.environ.get('LOCAL_WORLD_SIZE')!r}; set {where} to a divisor of the world size, {world_size}"
            )
        elif world_size % size:
            divisors = [str(number) for number in range(2, world_size + 1) if world_size % number == 0]
            found = f"{where} = {size}" if config.hybrid_shard_size else f"LOCAL_WORLD_SIZE = {size}"
            yield (
                f"{found} does not divide the world size, {world_size}; allowed for {where} are {', '.join(divisors)}"
            )


def _checkpointing_problems(model: nn.Module, config: ShardingConfig, strategy: str) -> Iterator[str]:
    # Looked for by name, as importing the compiler takes a second.
    if config.activation_checkpointing and any(type(part).__name__ == "OptimizedModule" for part in model.modules()):
        bare = bare_names(model)
        for unit in plan(model, config):
            changed = next((name for name, _ in unit.module.named_buffers()), None)
            if changed is not None:
                name = bare(f"{unit.name}.").rstrip(".")
                yield (
                    f"{strategy}_activation_checkpointing computes unit {name!r} again with the buffers that it had "
                    f"({changed!r}), which torch.compile can't follow; leave out one of the two"
                )
                return


def _shard_size(config: ShardingConfig) -> int:
    # torchrun tells each rank how many of them stand on its machine.
    return config.hybrid_shard_size or int(os.environ.get("LOCAL_WORLD_SIZE", "0"))


def _backends() -> str:
    return str(dist.get_backend_config()) if dist.is_initialized() else "cpu:gloo"


def _served_devices() -> Iterable[str]:
    return [entry.partition(":")[0] for entry in _backends().split(",")]


def _parameter_problems(
    model: nn.Module, device: torch.device, strategy: str, *, empty: bool, contiguous: bool
) -> Iterator[str]:
    for name, module in model.named_modules():
        if getattr(module, "sparse", None) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield f"{name or 'the model'!r} makes sparse gradients, and {strategy} reduces dense ones; set sparse=False"
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            yield f"parameter {name!r} has no dimensions and can't be cut into shards; give it the shape [1]"
        if not parameter.is_floating_point():
            yield (
                f"parameter {name!r} has dtype {_named(parameter.dtype)}, and {strategy} shards floating point only; "
                f"make it a buffer"
            )
        if not parameter.numel() and not empty:
            yield f"parameter {name!r} has no elements, and {strategy} can't cut it; leave it out"
        if not parameter.is_contiguous() and contiguous:
            yield (
                f"parameter {name!r} of shape {list(parameter.shape)} is not contiguous, and {strategy} can't cut it; "
                f"make it so: parameter.data = parameter.data.contiguous()"
            )
        if parameter.device.type not in ("cpu", "meta", device.type):
            yield f"parameter {name!r} lies on {parameter.device}, and this rank trains on {device}; move it there"


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
