"""Between forward and step: what is cut again, the norm over all shards, the scaler whose ranks agree."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


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
    """Clip by the global norm; `torch.nn.utils.clip_grad_norm_` would take the norm of this rank's shards for it."""
    assert isinstance(model, FullyShardedDataParallel)  # what wrap_model returned
    with warnings.catch_warnings():
        # A rank that holds nothing of a small model has no gradients, and that is as it should be.
        warnings.filterwarnings("ignore", message=r"Called FSDP\.clip_grad_norm_\(\) on rank", category=UserWarning)
        return model.clip_grad_norm_(max_norm, norm_type)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate whole gradients on every rank, without communication; this takes the memory of whole gradients."""
    assert isinstance(model, FullyShardedDataParallel)  # what wrap_model returned
    context: AbstractContextManager[None] = model.no_sync()
    return context


def grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    """Return the scaler that makes every rank skip a step if one has to; torch's plain one lets ranks drift apart."""
    assert isinstance(model, FullyShardedDataParallel)  # what wrap_model returned
    is_fp16 = torch.float16 in (model.mixed_precision.param_dtype, model.mixed_precision.reduce_dtype)
    assert model.compute_device is not None  # wrap_model gave it one
    return ShardedGradScaler(model.compute_device.type, enabled=is_fp16)
