"""What keeps the tensors of a bare model from being sent from rank to rank and trained there.

For strategy authors: a part of the hook `check_model` of any strategy that gives all ranks the same values.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch import nn

from parallel_core.tensors import is_dtensor, storage

__all__ = ["memory_problems", "overlap", "tensor_problems"]


def tensor_problems(model: nn.Module) -> Iterator[str]:
    """Yield what would make handing out the values fail, or the first step go wrong, a sentence each.

    Args:
        model: the bare model.
    """
    if torch.is_inference_mode_enabled():
        yield "torch.inference_mode() is on, and what is made under it can't be trained; wrap outside of it"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            yield (
                f"{name or 'the model'!r} writes the rows that it looks up in each forward (max_norm), other rows on "
                f"each rank, and the ranks' weights would drift apart; leave max_norm out, and limit the rows that the "
                f"forward has looked up"
            )
    tensors = _all_tensors(model)
    for kind, name, tensor in tensors:
        if tensor.layout is not torch.strided:
            yield f"{kind} {name!r} is sparse ({tensor.layout}), and dense ones alone can be sent; use to_dense()"
        elif any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
            yield (
                f"{kind} {name!r} of shape {list(tensor.shape)} and strides {list(tensor.stride())} is expanded, its "
                f"elements share memory and can't be written one by one; make it whole: clone(), after expand()"
            )
    made = next((f"{kind} {name!r}" for kind, name, tensor in tensors if tensor.is_inference()), None)
    if made is not None:
        yield f"{made} was made under torch.inference_mode() and can't be written; build the model outside of it"
    # The attribute is how FSDP1 knows what it holds a part of.
    cut = (name for _, name, tensor in tensors if is_dtensor(tensor) or getattr(tensor, "_fsdp_flattened", False))
    if (name := next(cut, None)) is not None:
        yield f"{name!r} is in shards already, as a part of another wrapped model; build a bare model with its own"
    with_gradient = next((name for name, parameter in model.named_parameters() if parameter.grad is not None), None)
    if with_gradient is not None:
        yield (
            f"parameter {with_gradient!r} has a gradient already, which the ranks have not averaged; call "
            f"zero_grad(set_to_none=True) before the wrap"
        )


def memory_problems(model: nn.Module, *, on_meta: bool = False) -> Iterator[str]:
    """Yield which parameters lie in memory of another parameter or of a buffer: for a wrap that moves them.

    They would train apart from then on. A parameter of several names is one, and no problem.

    Args:
        model: the bare model.
        on_meta: whether to look at the tensors on the meta device alone, and at buffers in one memory too: for a start
            that gives each its own.
    """
    together: dict[Hashable, list[tuple[int, int, str, torch.Tensor]]] = {}
    for kind, name, tensor in _all_tensors(model):
        if tensor.layout is torch.strided and tensor.numel() and (tensor.is_meta or not on_meta):
            together.setdefault(storage(tensor), []).append((*_reach(tensor), f"{kind} {name!r}", tensor))
    for pieces in together.values():
        earlier: list[tuple[int, int, str, torch.Tensor]] = []
        for piece in sorted(pieces, key=lambda piece: piece[:2]):
            start, _, name, tensor = piece
            earlier = [each for each in earlier if each[1] > start]
            for _, _, other, other_tensor in earlier:
                is_trained = isinstance(tensor, nn.Parameter) or isinstance(other_tensor, nn.Parameter)
                if (is_trained or on_meta) and overlap(tensor, other_tensor):
                    yield (
                        f"{other} and {name} lie in the same memory, and the wrap would give each its own; make "
                        f"them one parameter (a.weight = b.weight), or clone one"
                    )
            earlier.append(piece)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have elements in common: columns of a matrix have none."""
    (start, end), (other_start, other_end) = _reach(one), _reach(other)
    if end <= other_start or other_end <= start:
        return False
    if one.itemsize != other.itemsize or (one.is_contiguous() and other.is_contiguous()):
        return True
    size = max(end, other_end) // one.itemsize
    taken = torch.zeros(size, dtype=torch.bool, device="cpu")  # whatever the default device is
    taken.as_strided(one.shape, one.stride(), one.storage_offset()).fill_(True)
    return bool(taken.as_strided(other.shape, other.stride(), other.storage_offset()).any())


def _reach(tensor: torch.Tensor) -> tuple[int, int]:
    """Return from which byte of its storage a strided tensor reaches to which."""
    start = tensor.storage_offset() * tensor.itemsize
    span = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return int(start), int(start + span * tensor.itemsize) if tensor.numel() else int(start)


def _all_tensors(model: nn.Module) -> list[tuple[str, str, torch.Tensor]]:
    """Return kind, name and tensor of each parameter and each buffer."""
    found: list[tuple[str, str, torch.Tensor]] = [("parameter", *each) for each in model.named_parameters()]
    return [*found, *(("buffer", *each) for each in model.named_buffers())]
