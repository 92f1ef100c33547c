"""From a bare model to one sharded by `fully_shard`: what speaks against it, and the wrap itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from parallel_core import sharding, sharding_checks
from parallel_core.meta import MetaStart
from parallel_core.names import uncompiled
from parallel_core_fsdp2 import FSDP2Config, stepping, whole_gradients
from parallel_core_fsdp2.class_checks import class_problems

logger = logging.getLogger(__name__)


def problems(model: nn.Module, config: FSDP2Config, device: torch.device) -> Iterator[str]:
    """Yield what would make the wrap, or the first step, fail."""
    # Parameters are gathered one by one, so that only those whose gradients are reduced together must be alike.
    found = list(sharding_checks.problems(model, config, device, "fsdp2", one_dtype=False, contiguous=True))
    yield from found
    if found:
        return  # of a ScriptModule, say, whose attributes can't be looked through
    units = sharding.plan(model, config)
    yield from class_problems([("", uncompiled(model)), *((unit.name, unit.module) for unit in units)])


def wrap(model: nn.Module, config: FSDP2Config, device: torch.device) -> nn.Module:
    """Return the model, sharded in place, every rank starting from the same values.

    Raises:
        WrapError: the values differ between ranks and `sync_module_states` is off; nothing is touched then.
    """
    sharding.start_alike({**dict(model.named_parameters()), **dict(model.named_buffers())}, config, "fsdp2")
    chosen = _chosen(model, config)
    shard = _sharder(config, device)
    # From the inside out: a unit takes the parameters below it that no unit has taken yet.
    for module in reversed(chosen):
        shard(module, chosen[module])
    return _finished(model, config)


def wrap_meta(model: nn.Module, config: FSDP2Config, device: torch.device, start: MetaStart) -> nn.Module:
    """Return the wrapped model, each unit made, given its values and cut into shards before the next one is made.

    Raises:
        WrapError: the values differ between ranks and `sync_module_states` is off.
    """
    chosen = _chosen(model, config)
    shard = _sharder(config, device)

    def finished(module: nn.Module) -> nn.Module:
        if module in chosen:
            values = sharding.values_of_unit(module, chosen[module].name, FSDPModule, loads=start.loads)
            sharding.start_alike(values, config, "fsdp2")
            shard(module, chosen[module])
        return module

    start.materialise(model, finished)
    return _finished(model, config)


def _chosen(model: nn.Module, config: FSDP2Config) -> dict[nn.Module, sharding.ChosenUnit]:
    """Return what becomes a unit, the root first."""
    # Where the whole model is compiled, the compiler has yet to look inside.
    root = {uncompiled(model): sharding.ChosenUnit("", sharding.dtypes(config))}
    return {**root, **sharding.chosen_units(model, config, "fsdp2", logger)}


def _sharder(config: FSDP2Config, device: torch.device) -> Callable[[nn.Module, sharding.ChosenUnit], None]:
    """Return the function that makes a unit of a module; a collective."""
    mesh = sharding.device_mesh(config, device)
    offload = CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy()

    def shard(module: nn.Module, unit: sharding.ChosenUnit) -> None:
        sharding.return_no_views(module)
        marks = {name: dict(vars(parameter)) for name, parameter in module.named_parameters()}
        cast = MixedPrecisionPolicy(*unit.dtypes)
        fully_shard(module, mesh=mesh, mp_policy=cast, offload_policy=offload, reshard_after_forward=_reshards(config))
        for name, parameter in module.named_parameters():
            # What a user has set on it, for the groups of an optimizer, say.
            vars(parameter).update({mark: value for mark, value in marks[name].items() if mark not in vars(parameter)})

    return shard


def _finished(model: nn.Module, config: FSDP2Config) -> nn.Module:
    """Return the wrapped model, made ready for what `fully_shard` can't do by itself.

    Of a compiled model it is the module: the truth value of torch's wrapper is an error, and callers ask for it.
    """
    root = uncompiled(model)
    assert isinstance(root, FSDPModule)  # the last that was made a unit
    root.set_reduce_scatter_unused_params(config.reduce_unused_parameters)
    root.register_forward_pre_hook(stepping.prepare, prepend=True)
    whole_gradients.zero_with_modules(root)
    if isinstance(model, OptimizedModule):
        root._compiled_call_impl = model.dynamo_ctx(root._call_impl)
    return root


def _reshards(config: FSDP2Config) -> bool | None:
    if config.reshard_after_forward is None and config.sharding == "grad_op":
        return False
    return config.reshard_after_forward
