"""Around the step: what is prepared and freed, accumulation without communication, and the gradient scaler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from parallel_core import sharding
from parallel_core.record import find_record
from parallel_core_fsdp2 import FSDP2Config

PREPARED = "_parallel_core_prepared"


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
def prepare(model: nn.Module, *_: object) -> None:
    """Gather each unit once before a first forward under `torch.inference_mode()`, as a hook before that forward.

    What `fully_shard` makes when it gathers a unit for the first time is kept, and made in that mode it could never be
    trained with.
    """
    if not torch.is_inference_mode_enabled() or PREPARED in vars(model):
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        assert isinstance(model, FSDPModule)  # what wrap_model returned
        model._get_fsdp_state()._lazy_init()
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()
                unit.reshard()
    vars(model)[PREPARED] = True


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward has left gathered: the module holds other parameters until then."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate whole gradients on every rank, without communication; this takes the memory of whole gradients."""
    assert isinstance(model, FSDPModule)  # what wrap_model returned
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    """Return torch's own scaler: of gradients that are DTensors it reduces what it finds, so that all ranks skip."""
    record = find_record(model)
    assert record is not None  # wrap_model_for_training made one
    assert isinstance(record.config.options, FSDP2Config)
    is_fp16 = torch.float16 in sharding.dtypes(record.config.options)
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    return torch.amp.GradScaler(device, enabled=is_fp16)
