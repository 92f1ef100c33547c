"""A forward pass with gradients enabled and no backward pass, in 16 bits: what torch 2.13 makes of it, and our cure.

FSDP1 reduces a unit's gradients in a hook on the node that accumulates them, and sets it once between two backward
passes. A forward in 16 bits makes a new node, so after an abandoned forward the hook sits on a node that no backward
comes by: gradients are never reduced, every `.grad` is None, and no error says so. There is no public way to the hook.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.autograd import Variable
from torch.distributed.fsdp import FullyShardedDataParallel

from parallel_core import TrainingError
from parallel_core.outputs import tensors_in

HOOK = "_post_backward_hook_state"

LOST = (
    "the gradients of this backward pass are lost: a forward pass before it had gradients enabled and no backward pass "
    "of its own so far, and FSDP1 in 16 bits can't have both; evaluate under torch.no_grad(), or let go of what that "
    "forward returned, or run both losses in one backward"
)


class _Result:
    """Lives as long as what a forward returned, in whose hook it lies."""


def watch(model: FullyShardedDataParallel) -> None:
    """Make a backward pass after an abandoned forward right, or an error where what that one returned is still there.

    Args:
        model: what FSDP1 made of the whole model, with a low precision of its parameters.
    """
    # What hangs on the results of forwards whose backward has not run: gone when the results are.
    awaited: list[weakref.ref[_Result]] = []
    unhooked: list[Any] = []  # flat parameters whose hook belongs to an earlier forward that may still be used

    def before() -> None:
        if not torch.is_grad_enabled():
            return
        hooked = [parameter for parameter in _flat_parameters(model) if hasattr(parameter, HOOK)]
        awaited[:] = [result for result in awaited if result() is not None]
        unhooked.clear()
        if awaited:
            unhooked.extend(parameter for parameter in hooked if parameter.requires_grad)
        else:
            for parameter in hooked:
                delattr(parameter, HOOK)

    def after(output: Any) -> None:
        tensors = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        if not (torch.is_grad_enabled() and tensors):
            return
        suspects, this = list(unhooked), _Result()

        def on_backward() -> None:
            awaited[:] = [result for result in awaited if result() is not this]
            # Before FSDP1's own callback, which is queued by a hook that came later.
            Variable._execution_engine.queue_callback(check)

        def check() -> None:
            if not all(parameter._post_backward_called for parameter in suspects):
                raise TrainingError(LOST)

        awaited.append(weakref.ref(this))
        for tensor in tensors:
            tensor.register_hook(lambda grad: on_backward())

    # The compiler is to leave both alone, as it leaves FSDP1's own.
    before, after = torch.compiler.disable(before), torch.compiler.disable(after)
    model.register_forward_pre_hook(lambda module, args: before())
    model.module.register_forward_hook(lambda module, args, output: after(output))


def _flat_parameters(model: FullyShardedDataParallel) -> list[Any]:
    handles = [unit._handle for unit in FullyShardedDataParallel.fsdp_modules(model)]
    return [handle.flat_param for handle in handles if handle is not None]
