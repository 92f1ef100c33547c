"""From a bare model to `FullyShardedDataParallel`: what speaks against it, and the wrap itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from parallel_core import sharding, sharding_checks
from parallel_core.meta import MetaStart
from parallel_core.parameter_checks import kept_elsewhere
from parallel_core_fsdp import FSDPConfig, abandoned, stepping
from parallel_core_fsdp.model_state import names_of_nobody

logger = logging.getLogger(__name__)

STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}


def problems(model: nn.Module, config: FSDPConfig, device: torch.device) -> Iterator[str]:
    """Yield what would make the wrap, or the first step, fail; FSDP1 itself finds it with half of the model wrapped."""
    # A unit's parameters become one flat tensor, of one dtype.
    found = list(sharding_checks.problems(model, config, device, "fsdp"))
    yield from found
    if found:
        return  # of a model that is no bare one, say
    if odd := names_of_nobody(model):
        yield (
            f"the state dict of the model has {odd[0]!r}, which is no parameter, no buffer and no extra state of a "
            f"module, and fsdp puts it together from these; return it from get_extra_state"
        )
    units = {id(unit.module): unit.name for unit in sharding.plan(model, config)}
    for holder, attribute, name in kept_elsewhere(model, lambda item: units.get(id(item))):
        if f"{holder}.".startswith(f"{name}."):
            continue  # what is inside of a unit runs while the unit is whole: a forward that was replaced, say
        yield (
            f"{holder or 'the model'!r} keeps the module {name!r} in its attribute {attribute!r} too, where fsdp can't "
            f"put the wrapped one; reach it through its parent, or use nn.ModuleList"
        )


def wrap(model: nn.Module, config: FSDPConfig, device: torch.device) -> FullyShardedDataParallel:
    """Return the wrapped model, every rank starting from the same values.

    Raises:
        WrapError: the values differ between ranks and `sync_module_states` is off; nothing is touched then.
    """
    # On an accelerator FSDP1 takes rank 0's values itself, unit by unit; on the CPU it refuses to.
    syncs_itself = config.sync_module_states and device.type != "cpu"
    if not syncs_itself:
        sharding.start_alike({**dict(model.named_parameters()), **dict(model.named_buffers())}, config, "fsdp")
    chosen = _chosen(model, config)

    def policy(module: nn.Module) -> bool | dict[str, Any]:
        is_unit = module in chosen and module is not model
        return {"mixed_precision": _mixed_precision(*chosen[module].dtypes)} if is_unit else False

    wrapped = FullyShardedDataParallel(
        model,
        **_arguments(config, device),
        auto_wrap_policy=CustomPolicy(policy),
        mixed_precision=_mixed_precision(*chosen[model].dtypes),
        sync_module_states=syncs_itself,
    )
    return _watched(wrapped, config)


def wrap_meta(model: nn.Module, config: FSDPConfig, device: torch.device, start: MetaStart) -> FullyShardedDataParallel:
    """Return the wrapped model, each unit made, given its values and cut into shards before the next one is made.

    Not by FSDP's `param_init_fn`: that resets the rest of a unit after the units inside of it, so that the values of
    a model would depend on its units.

    Raises:
        WrapError: the values differ between ranks and `sync_module_states` is off.
    """
    chosen = _chosen(model, config)
    arguments = _arguments(config, device)

    def finished(module: nn.Module) -> nn.Module:
        if module not in chosen:
            return module
        unit = chosen[module]
        values = sharding.values_of_unit(module, unit.name, FullyShardedDataParallel, loads=start.loads)
        sharding.start_alike(values, config, "fsdp")
        return FullyShardedDataParallel(module, **arguments, mixed_precision=_mixed_precision(*unit.dtypes))

    wrapped = start.materialise(model, finished)
    assert isinstance(wrapped, FullyShardedDataParallel)  # what `finished` makes of the model
    return _watched(wrapped, config)


def _chosen(model: nn.Module, config: FSDPConfig) -> dict[nn.Module, sharding.ChosenUnit]:
    """Return what becomes a unit, the model last: all that FSDP1 is called for."""
    # BatchNorm would be left uncast behind the plan's back; the plan has made it a unit already.
    units = sharding.chosen_units(model, config, "fsdp", logger)
    chosen = {**units, model: sharding.ChosenUnit("", sharding.dtypes(config))}
    for module in chosen:
        sharding.return_no_views(module)
    return chosen


def _arguments(config: FSDPConfig, device: torch.device) -> dict[str, Any]:
    """Return the arguments that every unit gets alike."""
    return {
        # With a mesh, sharded state dicts are made of DTensors.
        "device_mesh": sharding.device_mesh(config, device),
        "sharding_strategy": STRATEGIES[config.sharding],
        "device_id": device,
        "cpu_offload": CPUOffload(offload_params=True) if config.cpu_offload else None,
        "use_orig_params": True,
    }


def _watched(wrapped: FullyShardedDataParallel, config: FSDPConfig) -> FullyShardedDataParallel:
    """Return the wrapped model, in the mode of what is inside, and made ready for what FSDP1 can't do by itself."""
    for unit in FullyShardedDataParallel.fsdp_modules(wrapped):
        unit.training = unit.module.training
    wrapped.register_forward_pre_hook(stepping.prepare)
    if config.mixed_precision != "fp32":
        abandoned.watch(wrapped)
    return wrapped


def _mixed_precision(param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None) -> MixedPrecision | None:
    if param_dtype is None and reduce_dtype is None:
        return None
    # Buffers keep their dtype: statistics and counters are ruined by a cast.
    return MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype, _module_classes_to_ignore=())
