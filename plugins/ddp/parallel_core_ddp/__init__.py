"""The strategy `ddp`: the whole model on every rank, gradients averaged by `DistributedDataParallel`.

What it leaves out is answered by the core's defaults, which are made for whole models: state dicts, optimizer state,
gradient clipping.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from parallel_core import StrategyConfig, WrapError, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallel_core.local_shards import LocalShard

__all__ = ["DDPConfig"]

Megabytes = Annotated[float, Meta(gt=0, le=1_000_000)]


class DDPConfig(StrategyConfig):
    """The arguments of `torch.nn.parallel.DistributedDataParallel` that its users set, with torch's defaults but one.

    Attributes:
        find_unused_parameters: look after each forward for parameters that take no part in the loss. Without it a
            step in which one has no gradient is an error at the next; with it every step costs a walk over the graph.
        gradient_as_bucket_view: let gradients be views of the communication buckets, which saves a copy of them all.
            torch's own default is False.
        static_graph: promise that every step uses the same parameters in the same order.
        bucket_cap_mb: size of a communication bucket in MiB; by default torch's 25, with a smaller first one.
        broadcast_buffers: give every rank rank 0's buffers (BatchNorm's statistics) at the start of each forward.
    """

    find_unused_parameters: bool = False
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    bucket_cap_mb: Megabytes | None = None
    broadcast_buffers: bool = True

    def problems(self) -> Iterator[str]:
        if self.static_graph and self.find_unused_parameters:
            yield "find_unused_parameters is in vain with static_graph, which finds them in the first step; set one"


@hookimpl
def strategy_config() -> type[DDPConfig]:
    return DDPConfig


# What gloo sends (torch 2.13): DistributedDataParallel hands it tensors as they are.
_SENT_BY_GLOO = frozenset(
    ["float64", "float32", "float16", "bfloat16", "complex128", "complex64", "int64", "int32", "int8", "uint8", "bool"]
)


@hookimpl
def check_model(model: nn.Module, device: torch.device) -> list[str]:
    from parallel_core.dtypes import dtype_name
    from parallel_core.tensor_checks import memory_problems, tensor_problems

    problems = list(tensor_problems(model))
    if any(parameter.device.type != device.type for parameter in model.parameters()):
        problems += memory_problems(model)  # moving the model gives each its own
    if device.type != "cpu" or not any(parameter.requires_grad for parameter in model.parameters()):
        return problems
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    dtypes = {name: dtype_name(tensor.dtype) for name, tensor in tensors.items()}
    return problems + [
        f"{name!r} is {dtype}, which DistributedDataParallel can't send over gloo; use another dtype, or train on a GPU"
        for name, dtype in dtypes.items()
        if dtype not in _SENT_BY_GLOO
    ]


@hookimpl
def wrap_model(model: nn.Module, config: DDPConfig, device: torch.device) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    from parallel_core import ranks
    from parallel_core_ddp import watching

    with ranks.agreement(WrapError):  # one rank alone may lack the memory
        model.to(device)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        # DistributedDataParallel refuses a module with nothing to average (a frozen teacher, a loss). Equal values on
        # all ranks are all that such a module needs.
        ranks.broadcast_tensors((*model.parameters(), *model.buffers()))
        watching.watch(model, finds_unused=False)
        return model
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        find_unused_parameters=config.find_unused_parameters,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        bucket_cap_mb=config.bucket_cap_mb,
        forward_sync_buffers=config.broadcast_buffers,
    )
    wrapped.training = model.training  # the wrapper's own; a call of train() would reach the module inside
    watching.watch(wrapped, finds_unused=config.find_unused_parameters)
    return wrapped


@hookimpl
def local_shards(model: nn.Module) -> dict[str, LocalShard]:
    from torch import nn

    from parallel_core.local_shards import LocalShard
    from parallel_core.record import bare_state, inner_module, spec_of

    # As by default, but that parameters are known to be the same on all ranks: they share the work of saving them.
    state = bare_state(inner_module(model))
    return {
        name: LocalShard.of(value, alike=isinstance(value, nn.Parameter))
        for name, value in state.items()
        if spec_of(name, value) is not None
    }


@hookimpl
def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    from torch.nn.parallel import DistributedDataParallel

    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


@hookimpl
def has_unsynchronised_gradients(model: nn.Module) -> bool:
    from parallel_core_ddp import watching

    return watching.has_unsynchronised_gradients(model)
