"""Around the step: what is prepared and cut again, the norm over all shards, the scaler whose ranks agree."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _lazy_init, _reshard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def prepare(model: nn.Module, *_: object) -> None:
    """Make what FSDP1 makes at the first use of a model, as a hook before its forward.

    What is made under `torch.inference_mode()` could never be trained with.
    """
    assert isinstance(model, FullyShardedDataParallel)  # what wrap_model returned
    if model._is_root is None:
        with torch.inference_mode(mode=False):
            _lazy_init(model, model)


def settle(model: nn.Module) -> None:
    """Cut again what a forward without a backward has left whole.

    Until then a parameter may be a view of its unit's, and a step would leave the whole as it was before.
    """
    assert isinstance(model, FullyShardedDataParallel)  # what wrap_model returned
    if model._is_root is None:
        return  # no forward has been here
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        handle = unit._handle
        if handle is not None and handle.uses_sharded_strategy and not handle.needs_unshard():
            _reshard(unit, handle, True)  # torch has no public way: summon_full_params leaves whole what it finds whole


def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip by the global norm; `torch.nn.utils.clip_grad_norm_` would take the norm of this rank's shards for it.

    FSDP1's own is not used: it computes in fp32 whatever the dtype, and knows no norm of 0 or of minus infinity. As
    torch does for a whole model, this takes the norm of each parameter, and then that of the norms.
    """
    assert isinstance(model, FullyShardedDataParallel)  # what wrap_model returned
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        return torch.zeros(())
    # Not of the gradients alone: a rank may hold nothing of a parameter.
    dtype = functools.reduce(torch.promote_types, [parameter.dtype for parameter in parameters])
    norms = _whole_norms(model, parameters, norm_type, torch.promote_types(dtype, torch.float32))
    norm: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    norm = norm.cpu() if model.cpu_offload.offload_params else norm
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm.to(dtype)


def _whole_norms(
    model: FullyShardedDataParallel, parameters: list[nn.Parameter], norm_type: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the norm of the gradient of each whole parameter; a collective, one for all of them.

    A rank that holds nothing of it adds nothing to it, and one without a gradient adds nothing to the norm of all.
    """
    empty = math.inf if norm_type < 0 else 0.0
    nothing = parameters[0].new_full((), empty, dtype=dtype)
    own = [
        nothing
        if parameter.grad is None or not parameter.grad.numel()
        else torch.linalg.vector_norm(parameter.grad.detach(), norm_type, dtype=dtype)
        for parameter in parameters
    ]
    norms: torch.Tensor = torch.stack(own).to(model.compute_device)
    is_power = math.isfinite(norm_type) and norm_type != 0  # that of 0 counts the elements that are not zero
    if is_power:
        norms = norms**norm_type
    reductions = {math.inf: dist.ReduceOp.MAX, -math.inf: dist.ReduceOp.MIN}
    dist.all_reduce(norms, op=reductions.get(norm_type, dist.ReduceOp.SUM), group=model.process_group)
    if is_power:
        norms = norms ** (1 / norm_type)
    return norms


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate whole gradients on every rank, without communication; this takes the memory of whole gradients."""
    assert isinstance(model, FullyShardedDataParallel)  # what wrap_model returned
    context: AbstractContextManager[None] = model.no_sync()
    return context


def has_unsynchronised_gradients(model: nn.Module) -> bool:
    """Return whether a unit has whole gradients: those of one that has communicated are cut."""
    assert isinstance(model, FullyShardedDataParallel)  # what wrap_model returned
    if model._is_root is None:
        return False  # no forward has been here
    flat = [handle.flat_param for handle in model._all_handles]
    return any(
        # FSDP1 keeps the unit's after zero_grad has taken those of its parameters, until the next forward.
        unit.grad is not None
        and unit.grad.numel() != unit.numel()
        and any(parameter.grad is not None for parameter in unit._params or ())
        for unit in flat
    )


def grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    """Return the scaler that makes every rank skip a step if one has to; torch's plain one lets ranks drift apart."""
    assert isinstance(model, FullyShardedDataParallel)  # what wrap_model returned
    is_fp16 = torch.float16 in (model.mixed_precision.param_dtype, model.mixed_precision.reduce_dtype)
    assert model.compute_device is not None  # wrap_model gave it one
    return ShardedGradScaler(model.compute_device.type, enabled=is_fp16)
