"""From a bare model to one sharded by `fully_shard`: what speaks against it, and the wrap itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from parallel_core import ranks, sharding
from parallel_core.names import uncompiled
from parallel_core.recomputation import recompute_units
from parallel_core_fsdp2 import FSDP2Config

logger = logging.getLogger(__name__)


def problems(model: nn.Module, config: FSDP2Config, device: torch.device) -> Iterator[str]:
    """Yield what would make the wrap, or the first step, fail."""
    # Parameters are gathered one by one, so that only those whose gradients are reduced together must be alike.
    yield from sharding.problems(model, config, device, "fsdp2", one_dtype=False)


def wrap(model: nn.Module, config: FSDP2Config, device: torch.device) -> nn.Module:
    """Return the model, sharded in place, every rank starting from the same values.

    Raises:
        WrapError: the values differ between ranks and `sync_module_states` is off; nothing is touched then.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ranks.start_alike(tensors, broadcast=config.sync_module_states, field="fsdp2_sync_module_states")
    units = sharding.plan(model, config)
    if not units and ranks.rank() == 0:
        logger.warning(sharding.no_units_warning(model, config, "fsdp2"))
    modules = [unit.module for unit in units]
    uncast = {module for module in modules if sharding.stays_uncast(module, config)}
    if config.activation_checkpointing:
        standing = recompute_units(model, units)
        uncast = {stand for stand, module in zip(standing, modules, strict=True) if module in uncast}
        modules = standing
    del tensors, units  # they hold the whole parameters, of which each is freed below as it is cut
    # Where the whole model is compiled, the compiler has yet to look inside.
    root = uncompiled(model)
    param_dtype, reduce_dtype = sharding.dtypes(config)
    cast = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    mesh = sharding.device_mesh(config, device)
    # From the inside out: a unit takes the parameters below it that no unit has taken yet.
    for module in (*reversed(modules), root):
        # Before torch's own hook, which looks at what comes out.
        module.register_forward_hook(lambda module, args, output: _without_views(output))
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=_reduction(config)) if module in uncast else cast,
            offload_policy=CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
            reshard_after_forward=_reshards(config),
        )
    if isinstance(model, OptimizedModule):
        # Compiled in place, because the truth value of torch's wrapper is an error, and callers write `wrap(...) or`.
        root._compiled_call_impl = model.dynamo_ctx(root._call_impl)
    return root


def _reshards(config: FSDP2Config) -> bool | None:
    if config.reshard_after_forward is None and config.sharding == "grad_op":
        return False
    return config.reshard_after_forward


def _reduction(config: FSDP2Config) -> torch.dtype | None:
    # What is not cast is not reduced in a lower dtype either, unless that was asked for by itself.
    return None if config.reduce_precision is None else sharding.dtypes(config)[1]


def _without_views(output: Any) -> Any:
    """Return the output of a unit with a copy in place of each view.

    The hook that gathers a unit for its backward sits on what the unit returns. Where that is a view, an operation in
    place on it (`x += y`) drops the hook, and gradients are wrong without a word. A linear layer returns views.
    """
    if not torch.is_grad_enabled():
        return output
    return tree_map_only(
        torch.Tensor, lambda tensor: tensor.clone() if tensor.requires_grad and tensor._is_view() else tensor, output
    )
