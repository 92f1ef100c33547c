"""From a bare model to `FullyShardedDataParallel`: its units, what speaks against it, and the wrap itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from parallel_core import WrapError, ranks
from parallel_core.meta import MetaStart
from parallel_core.units import Unit, choose_units, describe_no_units, root_unit
from parallel_core_fsdp import FSDPConfig

logger = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def plan(model: nn.Module, config: FSDPConfig) -> list[Unit]:
    """Return the units that `wrap` makes, without the root."""
    return choose_units(model, config.auto_wrap_min_params, always=lambda module: _stays_fp32(module, config))


def problems(model: nn.Module, config: FSDPConfig, device: torch.device) -> Iterator[str]:
    """Yield what would make the wrap, or the first step, fail; FSDP1 itself finds it with half of the model wrapped."""
    if config.cpu_offload and device.type == "cpu":
        yield (
            f"fsdp_cpu_offload keeps parameters on the CPU while an accelerator computes, and this rank trains on "
            f"{device}; set fsdp_cpu_offload = false"
        )
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel | DistributedDataParallel):
            yield f"{name or 'the model'!r} is a {type(module).__name__} already; pass the bare model"
            return
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            yield f"parameter {name!r} has no dimensions and can't be cut into shards; give it the shape [1]"
        if not parameter.is_floating_point():
            dtype = str(parameter.dtype).removeprefix("torch.")
            yield f"parameter {name!r} has dtype {dtype}, and FSDP shards floating point only; make it a buffer"
        if parameter.device.type not in ("cpu", "meta", device.type):
            yield f"parameter {name!r} lies on {parameter.device}, and this rank trains on {device}; move it there"
    units = plan(model, config)
    for unit in (*units, root_unit(model, units)):
        by_dtype: dict[torch.dtype, str] = {}
        for name, parameter in unit.parameters.items():
            by_dtype.setdefault(parameter.dtype, name)
        if len(by_dtype) > 1:
            found = " and ".join(f"{str(dtype).removeprefix('torch.')} ({name!r})" for dtype, name in by_dtype.items())
            where = f"unit {unit.name!r}" if unit.name else "the root unit"
            yield f"{where} has parameters of {found}, and FSDP gathers one dtype at a time; convert the model to one"


def wrap(model: nn.Module, config: FSDPConfig, device: torch.device) -> FullyShardedDataParallel:
    """Return the wrapped model, every rank starting from the same values.

    Raises:
        WrapError: the values differ between ranks and `sync_module_states` is off; nothing is touched then.
    """
    on_accelerator = device.type != "cpu"
    # FSDP's own way takes the values through the accelerator, unit by unit, and refuses to do so on the CPU.
    if not (config.sync_module_states and on_accelerator):
        _agree_on_values({**dict(model.named_parameters()), **dict(model.named_buffers())}, config, "in all")
    chosen = _chosen(model, config)

    def policy(module: nn.Module) -> bool | dict[str, Any]:
        if module not in chosen:
            return False
        return {"mixed_precision": None} if _stays_fp32(module, config) else True

    return FullyShardedDataParallel(
        model,
        **_arguments(config, device),
        auto_wrap_policy=CustomPolicy(policy),
        mixed_precision=_mixed_precision(config),
        sync_module_states=config.sync_module_states and on_accelerator,
    )


def wrap_meta(model: nn.Module, config: FSDPConfig, device: torch.device, start: MetaStart) -> nn.Module:
    """Return the wrapped model, each unit made, given its values and cut into shards before the next one is made.

    Not by FSDP's `param_init_fn`: that resets the rest of a unit after the units inside of it, so that the values of
    a model would depend on its units.

    Raises:
        WrapError: the values differ between ranks and `sync_module_states` is off.
    """
    chosen = _chosen(model, config)
    arguments = _arguments(config, device)

    def finished(module: nn.Module) -> nn.Module:
        if module is not model and module not in chosen:
            return module
        _agree_on_values(dict(_values_of_unit(module, chosen.get(module, ""), start)), config, "in its unit")
        precision = None if _stays_fp32(module, config) and module in chosen else _mixed_precision(config)
        return FullyShardedDataParallel(module, **arguments, mixed_precision=precision)

    return start.materialise(model, finished)


def _chosen(model: nn.Module, config: FSDPConfig) -> dict[nn.Module, str]:
    """Return the modules that become units, with their names; warn where there are none."""
    units = plan(model, config)
    if not units and ranks.rank() == 0 and next(model.parameters(), None) is not None:
        logger.warning(describe_no_units(model, "fsdp_auto_wrap_min_params", config.auto_wrap_min_params))
    return {unit.module: unit.name for unit in units}


def _arguments(config: FSDPConfig, device: torch.device) -> dict[str, Any]:
    """Return the arguments that every unit gets alike."""
    return {
        # With a mesh, sharded state dicts are made of DTensors.
        "device_mesh": init_device_mesh(device.type, (ranks.world_size(),)),
        "device_id": device,
        "cpu_offload": CPUOffload(offload_params=True) if config.cpu_offload else None,
        "use_orig_params": True,
    }


def _agree_on_values(tensors: dict[str, torch.Tensor], config: FSDPConfig, where: str) -> None:
    """Give every rank rank 0's values, or make sure that they are the same; `where` tells what the tensors are."""
    if config.sync_module_states:
        for tensor in tensors.values():
            ranks.broadcast_tensor(tensor)
    elif differing := ranks.differing_tensors(tensors):
        raise WrapError(
            f"initial values differ between ranks, first those of {differing[0]!r} ({len(differing)} {where}); seed "
            f"all ranks alike, or set fsdp_sync_module_states = true"
        )


def _values_of_unit(module: nn.Module, path: str, start: MetaStart) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a unit holds outside of the units inside it; without what a state dict is going to overwrite."""
    for name, buffer in module.named_buffers(path, recurse=False):
        if not start.loads or name.rpartition(".")[2] in module._non_persistent_buffers_set:
            yield name, buffer
    if not start.loads:
        yield from module.named_parameters(path, recurse=False)
    for name, child in module.named_children():
        if not isinstance(child, FullyShardedDataParallel):
            yield from _values_of_unit(child, f"{path}.{name}" if path else name, start)


def _mixed_precision(config: FSDPConfig) -> MixedPrecision | None:
    if config.mixed_precision == "fp32":
        return None
    dtype = DTYPES[config.mixed_precision]
    # Buffers keep their dtype: statistics and counters are ruined by a cast. FSDP would wrap BatchNorm by itself,
    # behind the back of the plan; `plan` has done so already.
    return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, _module_classes_to_ignore=())


def _stays_fp32(module: nn.Module, config: FSDPConfig) -> bool:
    # A batch norm takes low-precision input beside full-precision weights and statistics, and nothing else.
    return config.mixed_precision != "fp32" and isinstance(module, _BatchNorm)
