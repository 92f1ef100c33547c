"""What keeps a sharding strategy from wrapping a model as its settings ask, found before anything is touched.

For strategy authors: with a config that is a `parallel_core.sharding_config.ShardingConfig`, this is most of the hook
`check_model`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from parallel_core import ranks
from parallel_core.dtypes import dtype_name
from parallel_core.names import bare_names, uncompiled, unwrapped
from parallel_core.parameter_checks import parameter_problems
from parallel_core.sharding import plan, shard_size
from parallel_core.sharding_config import ShardingConfig
from parallel_core.tensor_checks import tensor_problems
from parallel_core.units import Unit, has_forward, layer_problems, root_unit

__all__ = ["problems"]


def problems(
    model: nn.Module,
    config: ShardingConfig,
    device: torch.device,
    strategy: str,
    *,
    one_dtype: bool = True,
    contiguous: bool = False,
) -> Iterator[str]:
    """Yield what would make the wrap, or the first step, fail; the answer to the hook `check_model`.

    Args:
        model: the bare model.
        config: the settings.
        device: where this rank trains.
        strategy: the strategy's name, the prefix of the settings in the messages.
        one_dtype: whether all parameters of a unit must have one dtype; otherwise those that train must.
        contiguous: whether a parameter must be contiguous.
    """
    root = unwrapped(model)
    if not has_forward(root):
        yield f"the model is a {type(root).__name__}, which has no forward; wrap the module that calls its parts"
    yield from _setting_problems(config, device, strategy)
    units = plan(model, config)
    if config.activation_checkpointing:
        yield from _checkpointing_problems(model, units, strategy)
    yield from layer_problems(model, config.wrap_layers, f"{strategy}_wrap_layers")
    yield from tensor_problems(model)
    yield from parameter_problems(model, device, strategy, contiguous=contiguous)
    for unit in (*units, root_unit(model, units)):
        by_dtype: dict[torch.dtype, str] = {}
        for name, parameter in unit.parameters.items():
            if one_dtype or parameter.requires_grad:
                by_dtype.setdefault(parameter.dtype, name)
        if len(by_dtype) > 1:
            found = " and ".join(f"{dtype_name(dtype)} ({name!r})" for dtype, name in by_dtype.items())
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
        world_size, size = ranks.world_size(), shard_size(config)
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


def _checkpointing_problems(model: nn.Module, units: list[Unit], strategy: str) -> Iterator[str]:
    if all(uncompiled(part) is part for part in model.modules()):
        return
    bare = bare_names(model)
    for unit in units:
        changed = next((name for name, _ in unit.module.named_buffers()), None)
        if changed is not None:
            name = bare(f"{unit.name}.").rstrip(".")
            yield (
                f"{strategy}_activation_checkpointing computes unit {name!r} again with the buffers that it had "
                f"({changed!r}), which torch.compile can't follow; leave out one of the two"
            )
            return


def _backends() -> str:
    return str(dist.get_backend_config()) if dist.is_initialized() else "cpu:gloo"


def _served_devices() -> Iterable[str]:
    return [entry.partition(":")[0] for entry in _backends().split(",")]
