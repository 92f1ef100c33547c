"""The whole gradients that backward passes under `no_sync` leave behind, out of the sight of `zero_grad`.

A parameter of the model is a DTensor with a gradient that is one; `fully_shard` keeps the whole parameter beside it,
and on that, or beside that in the dtype of reduction, the gradient that has not been reduced. From its forward to its
backward the root's parameters are the whole ones, and then `zero_grad` misses the gradients of the DTensors too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule


def are_there(model: nn.Module) -> bool:
    """Return whether any parameter has a gradient that waits for the backward pass that reduces it."""
    assert isinstance(model, FSDPModule)  # what wrap_model returned
    states = model._get_fsdp_state()._state_ctx.all_states  # of all units; none before the first forward
    return any(_waiting(each) for state in states for group in state._fsdp_param_groups for each in group.fsdp_params)


def zero_with_modules(model: nn.Module) -> None:
    """Let `zero_grad` of the model, and of each unit in it, drop what waits."""
    for unit in _units(model):
        vars(unit)["zero_grad"] = _zeroing_all(unit.zero_grad, list(_units(unit)))


def zero_with_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let `zero_grad` of an optimizer drop what waits for the parameters that it holds."""
    zero_grad, units = optimizer.zero_grad, list(_units(model))

    def zero_grad_of_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        _drop(parameter for unit in units for parameter in _parameters(unit) if parameter.sharded_param in held)

    vars(optimizer)["zero_grad"] = zero_grad_of_all


def _zeroing_all(zero_grad: Callable[[bool], None], units: list[nn.Module]) -> Callable[..., None]:
    def zero_grad_of_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none)
        parameters = [parameter for unit in units for parameter in _parameters(unit)]
        _drop(parameters)
        for parameter in parameters:
            sharded = parameter.sharded_param
            if set_to_none:
                sharded.grad = None
            elif sharded.grad is not None:
                sharded.grad.zero_()

    return zero_grad_of_all


def _units(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _parameters(unit: nn.Module) -> Iterator[Any]:
    """Yield what `fully_shard` knows of each parameter of a unit; there is no public way to it."""
    assert isinstance(unit, FSDPModule)
    for group in unit._get_fsdp_state()._fsdp_param_groups:
        yield from group.fsdp_params


def _waiting(parameter: Any) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)  # made when it is gathered for the first time
    return parameter.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)


def _drop(parameters: Iterable[Any]) -> None:
    for parameter in parameters:
        if _waiting(parameter):
            parameter.unsharded_accumulated_grad = parameter._unsharded_param.grad = None
