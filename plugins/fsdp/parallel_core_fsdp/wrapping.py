"""From a bare model to `FullyShardedDataParallel`: what speaks against it, and the wrap itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from parallel_core import ranks, sharding
from parallel_core.recomputation import recompute_units
from parallel_core_fsdp import FSDPConfig, abandoned

logger = logging.getLogger(__name__)

STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}


def problems(model: nn.Module, config: FSDPConfig, device: torch.device) -> Iterator[str]:
    """Yield what would make the wrap, or the first step, fail; FSDP1 itself finds it with half of the model wrapped."""
    # A unit's parameters become one flat tensor, of one dtype.
    yield from sharding.problems(model, config, device, "fsdp", one_dtype=True)


def wrap(model: nn.Module, config: FSDPConfig, device: torch.device) -> FullyShardedDataParallel:
    """Return the wrapped model, every rank starting from the same values.

    Raises:
        WrapError: the values differ between ranks and `sync_module_states` is off; nothing is touched then.
    """
    # On an accelerator FSDP1 takes rank 0's values itself, unit by unit; on the CPU it refuses to.
    syncs_itself = config.sync_module_states and device.type != "cpu"
    if not syncs_itself:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        ranks.start_alike(tensors, broadcast=config.sync_module_states, field="fsdp_sync_module_states")
    units = sharding.plan(model, config)
    if not units and ranks.rank() == 0:
        logger.warning(sharding.no_units_warning(model, config, "fsdp"))
    modules = [unit.module for unit in units]
    uncast = [sharding.stays_uncast(module, config) for module in modules]
    if config.activation_checkpointing:
        modules = recompute_units(model, units)
    # BatchNorm would be left uncast behind the plan's back; the plan has made it a unit already.
    chosen: dict[nn.Module, bool | dict[str, Any]] = {
        module: {"mixed_precision": _reduction_alone(config)} if stays else True
        for module, stays in zip(modules, uncast, strict=True)
    }
    param_dtype, reduce_dtype = sharding.dtypes(config)
    wrapped = FullyShardedDataParallel(
        model,
        # With a mesh, sharded state dicts are made of DTensors.
        device_mesh=sharding.device_mesh(config, device),
        sharding_strategy=STRATEGIES[config.sharding],
        device_id=device,
        auto_wrap_policy=CustomPolicy(lambda module: chosen.get(module, False)),
        mixed_precision=_mixed_precision(param_dtype, reduce_dtype),
        cpu_offload=CPUOffload(offload_params=True) if config.cpu_offload else None,
        sync_module_states=syncs_itself,
        use_orig_params=True,
    )
    if param_dtype is not None:
        abandoned.watch(wrapped)
    return wrapped


def _mixed_precision(param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> MixedPrecision | None:
    if param_dtype is None and reduce_dtype is None:
        return None
    # Buffers keep their dtype: statistics and counters are ruined by a cast.
    return MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype, _module_classes_to_ignore=())


def _reduction_alone(config: FSDPConfig) -> MixedPrecision | None:
    # What is not cast is not reduced in a lower dtype either, unless that was asked for by itself.
    return _mixed_precision(None, None if config.reduce_precision is None else sharding.dtypes(config)[1])
