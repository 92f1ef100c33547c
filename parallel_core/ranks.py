"""What ranks do together: agree on errors, compare values and hand them on.

For strategy authors too. Every function here is a collective over the default process group, or over another one of
all ranks where it takes one: call it on every rank at the same point. Without a process group each of them is the plain
answer of a world of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist

from parallel_core.agreeing import Comparison, agree, agreement, comparison
from parallel_core.errors import WrapError
from parallel_core.messages import all_gather, broadcast, in_contact, rank, reachable_device, world_size

__all__ = [
    "Comparison",
    "agree",
    "agreement",
    "all_gather",
    "bits",
    "broadcast",
    "broadcast_tensor",
    "broadcast_tensors",
    "comparison",
    "differing_tensors",
    "in_contact",
    "rank",
    "start_alike",
    "world_size",
]

_TOGETHER = 1 << 20  # bytes of tensors that are sent in one message


def broadcast_tensor(tensor: torch.Tensor) -> None:
    """Overwrite a plain tensor with rank 0's, bit for bit; shape and dtype must be the same on every rank."""
    broadcast_tensors([tensor])


def broadcast_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite plain tensors with rank 0's, as `broadcast_tensor` does; small ones travel together, within 1 MiB.

    A tensor larger than that is sent from and received into its own memory, where it is contiguous.
    """
    if world_size() == 1:
        return
    for together in _sent_together(tensors):
        _broadcast(together)


def differing_tensors(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names whose tensors are not the same bits on every rank; the same list on every rank.

    Names, shapes and dtypes must be the same on every rank. Costs a broadcast, and the memory, of one tensor at a time,
    or of as many small ones as `broadcast_tensors` sends together.
    """
    differ: set[torch.Tensor] = set()
    for together in _sent_together(tensors.values()):
        expected = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in together]
        broadcast_tensors(expected)
        # NaN differs from itself as a number, not as bits.
        differ.update(
            own for own, other in zip(together, expected, strict=True) if not torch.equal(bits(other), bits(own))
        )
    mine = [name for name, tensor in tensors.items() if tensor in differ]
    found = {name for names in all_gather(mine) for name in names}
    return [name for name in tensors if name in found]


def start_alike(tensors: Mapping[str, torch.Tensor], *, broadcast: bool, field: str) -> None:
    """Make sure that every rank starts from the same values, or raise on every rank, with nothing changed.

    Args:
        tensors: the bare model's parameters and buffers by name, plain tensors of the same shapes on every rank.
        broadcast: whether rank 0's values are taken; otherwise they are compared.
        field: the setting that says which, with the strategy's prefix.

    Raises:
        WrapError: they were compared, and differ.
    """
    if broadcast:
        broadcast_tensors(tensors.values())
    elif differing := differing_tensors(tensors):
        raise WrapError(
            f"initial values differ between ranks, first those of {differing[0]!r} ({len(differing)} of {len(tensors)} "
            f"tensors); seed all ranks alike, or set {field} = true"
        )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, to compare it bit for bit: NaN equals itself, and every dtype can be compared.

    Of a contiguous tensor they are its own memory, not a copy.
    """
    contiguous = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not view(-1): a tensor of one element may have any stride and counts as contiguous all the same.
    return contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)


def _sent_together(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors that have elements, in order, in lists: of one, or of several on one device, within 1 MiB."""
    together: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        size = sum(each.nbytes for each in together) + tensor.nbytes
        if together and (size > _TOGETHER or tensor.device != together[0].device):
            yield together
            together = []
        together.append(tensor)
    if together:
        yield together


def _broadcast(tensors: list[torch.Tensor]) -> None:
    """Overwrite tensors on one device with rank 0's, in one message."""
    targets = [_written_once(tensor.detach()) for tensor in tensors]
    contiguous = [target.resolve_conj().resolve_neg().contiguous() for target in targets]
    # Bytes, because a backend refuses some dtypes (bool, complex, fp8) that nobody wants to be computed with here.
    data = [bits(each) for each in contiguous]
    message = data[0] if len(data) == 1 else torch.cat(data)
    staged = message.to(reachable_device(message.device))
    with in_contact():
        dist.broadcast(staged, src=0)
    if rank() == 0 or staged.data_ptr() == targets[0].data_ptr():
        return  # they are the sender's own, or were received into the one tensor's own memory
    for target, copy, own, received in zip(targets, contiguous, data, staged.split([*map(len, data)]), strict=True):
        own.copy_(received)
        if copy.data_ptr() != target.data_ptr():
            target.copy_(copy)


def _written_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that has all of its elements once: of one that is seen many times (`expand`)."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
