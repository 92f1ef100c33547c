"""What keeps the tensors of a bare model from being sent from rank to rank and trained there.

For strategy authors: a part of the hook `check_model` of any strategy that gives all ranks the same values.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

__all__ = ["tensor_problems"]


def tensor_problems(model: nn.Module) -> Iterator[str]:
    """Yield what would make handing out the values fail, or the first step go wrong, a sentence each.

    Args:
        model: the bare model.
    """
    if torch.is_inference_mode_enabled():
        yield "torch.inference_mode() is on, and what is made under it can't be trained; wrap outside of it"
    named = [("parameter", *each) for each in model.named_parameters()]
    for kind, name, tensor in named + [("buffer", *each) for each in model.named_buffers()]:
        if tensor.layout is not torch.strided:
            yield f"{kind} {name!r} is sparse ({tensor.layout}), and dense ones alone can be sent; use to_dense()"
        elif any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            yield (
                f"{kind} {name!r} of shape {list(tensor.shape)} and strides {list(tensor.stride())} is expanded, its "
                f"elements share memory and can't be written one by one; make it whole: clone(), after expand()"
            )
    of_inference = [name for _, name, tensor in named if tensor.is_inference()]
    if of_inference:
        yield (
            f"parameter {of_inference[0]!r} was made under torch.inference_mode() and can't be trained; build the "
            f"model outside of it"
        )
    with_gradient = [name for _, name, tensor in named if tensor.grad is not None]
    if with_gradient:
        yield (
            f"parameter {with_gradient[0]!r} has a gradient already, which the ranks have not averaged; call "
            f"zero_grad() before the wrap"
        )
