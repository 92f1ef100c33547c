"""From a bare model to one sharded by `fully_shard`: what speaks against it, and the wrap itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from parallel_core import ranks, sharding
from parallel_core.meta import MetaStart
from parallel_core.names import uncompiled
from parallel_core.recomputation import recompute_units
from parallel_core_fsdp2 import FSDP2Config

logger = logging.getLogger(__name__)


def problems(model: nn.Module, config: FSDP2Config, device: torch.device) -> Iterator[str]:
    """Yield what would make the wrap, or the first step, fail."""
    # Parameters are gathered one by one, so that only those whose gradients are reduced together must be alike.
    yield from sharding.problems(model, config, device, "fsdp2", one_dtype=False, contiguous=True)


def wrap(model: nn.Module, config: FSDP2Config, device: torch.device) -> nn.Module:
    """Return the model, sharded in place, every rank starting from the same values.

    Raises:
        WrapError: the values differ between ranks and `sync_module_states` is off; nothing is touched then.
    """
    _start_alike({**dict(model.named_parameters()), **dict(model.named_buffers())}, config)
    chosen = _chosen(model, config)
    shard = _sharder(config, device)
    # From the inside out: a unit takes the parameters below it that no unit has taken yet.
    for module in reversed(chosen):
        shard(module, chosen[module].precision)
    return _compiled_in_place(model)


def wrap_meta(model: nn.Module, config: FSDP2Config, device: torch.device, start: MetaStart) -> nn.Module:
    """Return the wrapped model, each unit made, given its values and cut into shards before the next one is made.

    Raises:
        WrapError: the values differ between ranks and `sync_module_states` is off.
    """
    chosen = _chosen(model, config)
    shard = _sharder(config, device)

    def finished(module: nn.Module) -> nn.Module:
        if module in chosen:
            _start_alike(sharding.values_of_unit(module, chosen[module].name, FSDPModule, loads=start.loads), config)
            shard(module, chosen[module].precision)
        return module

    start.materialise(model, finished)
    return _compiled_in_place(model)


class _Chosen(NamedTuple):
    """What is chosen for a unit: its name in the bare model, and what it is cast to."""

    name: str
    precision: MixedPrecisionPolicy


def _chosen(model: nn.Module, config: FSDP2Config) -> dict[nn.Module, _Chosen]:
    """Return the modules that become units, the root first; warn where there are none but the root.

    The others are put into wrappers that recompute, where the settings ask for it.
    """
    units = sharding.plan(model, config)
    if not units and ranks.rank() == 0 and next(model.parameters(), None) is not None:
        logger.warning(sharding.no_units_warning(model, config, "fsdp2"))
    param_dtype, reduce_dtype = sharding.dtypes(config)
    cast = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    # What is not cast is not reduced in a lower dtype either, unless that was asked for by itself.
    uncast = MixedPrecisionPolicy(reduce_dtype=None if config.reduce_precision is None else reduce_dtype)
    chosen = [_Chosen(unit.name, uncast if sharding.stays_uncast(unit.module, config) else cast) for unit in units]
    modules = recompute_units(model, units) if config.activation_checkpointing else [unit.module for unit in units]
    # Where the whole model is compiled, the compiler has yet to look inside.
    return {uncompiled(model): _Chosen("", cast), **dict(zip(modules, chosen, strict=True))}


def _sharder(config: FSDP2Config, device: torch.device) -> Callable[[nn.Module, MixedPrecisionPolicy], None]:
    """Return the function that makes a unit of a module; a collective."""
    mesh = sharding.device_mesh(config, device)
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()

    def shard(module: nn.Module, precision: MixedPrecisionPolicy) -> None:
        sharding.return_no_views(module)
        fully_shard(
            module, mesh=mesh, mp_policy=precision, offload_policy=offload, reshard_after_forward=_reshards(config)
        )

    return shard


def _start_alike(tensors: dict[str, torch.Tensor], config: FSDP2Config) -> None:
    ranks.start_alike(tensors, broadcast=config.sync_module_states, field="fsdp2_sync_module_states")


def _compiled_in_place(model: nn.Module) -> nn.Module:
    """Return the module of a compiled model: the truth value of torch's wrapper is an error, and callers ask for it."""
    root = uncompiled(model)
    if isinstance(model, OptimizedModule):
        root._compiled_call_impl = model.dynamo_ctx(root._call_impl)
    return root


def _reshards(config: FSDP2Config) -> bool | None:
    if config.reshard_after_forward is None and config.sharding == "grad_op":
        return False
    return config.reshard_after_forward
