"""What ranks do together: agree on errors, compare values and hand them on.

For strategy authors too. Every function here is a collective over the default process group, or over another one of
all ranks where it takes one: call it on every rank at the same point. Without a process group each of them is the plain
answer of a world of one.
"""

from __future__ import annotations

import ctypes
import hashlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from parallel_core import errors
from parallel_core.errors import ParallelCoreError, RankError, WrapError

# What went wrong on a rank: the class to raise, and the message.
Verdict = tuple[type[ParallelCoreError], str] | None

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


_SHORT = 256  # bytes of a message that all ranks send each other at once
_HEADER = 8  # of these, for the length
_TOGETHER = 1 << 20  # bytes of tensors that are sent in one message


def rank() -> int:
    """Return this process's rank, 0 where there is no process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks, 1 where there is no process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, by rank. The values are pickled: small ones only, never tensors."""
    if _size(group) == 1:
        return [value]
    # One collective where torch's all_gather_object takes two: nearly all values are short, and most a plain None.
    data = pickle.dumps(value)
    found = _all_gather_bytes(len(data).to_bytes(_HEADER) + data, _SHORT, group)
    lengths = [int.from_bytes(each[:_HEADER]) for each in found]
    if max(lengths) > _SHORT - _HEADER:
        found = [bytes(_HEADER) + each for each in _all_gather_bytes(data, max(lengths), group)]
    return [
        pickle.loads(each[_HEADER : _HEADER + length])  # noqa: S301  # from this program's other ranks
        for each, length in zip(found, lengths, strict=True)
    ]


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's value on every rank; what the other ranks pass is ignored. Pickled, as in `all_gather`."""
    if _size(group) == 1:
        return value
    values = [value]
    with in_contact():
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


@contextmanager
def in_contact() -> Iterator[None]:
    """Run a block that talks to other ranks.

    Raises:
        RankError: torch could not reach them: one has ended, or did not come in time.
    """
    try:
        yield
    except RuntimeError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise RankError(
            f"another rank could not be reached: {reason}; look at what the other ranks wrote: one may have ended"
        ) from error


@contextmanager
def agreement(kind: type[ParallelCoreError] = RankError, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run the block on every rank; if it fails on any of them, raise one and the same error on all.

    The block must not contain a collective that a failing rank would miss.

    Args:
        kind: the class of the error raised for a failure that is not an error of parallel_core.
        group: the process group of all ranks to agree through; by default the default one.

    Raises:
        ParallelCoreError: the block failed somewhere; see `agree`.
    """
    caught: Exception | None = None
    try:
        yield
    except Exception as error:
        caught = error
    agree(caught, kind, group)


def agree(
    error: Exception | None, kind: type[ParallelCoreError] = RankError, group: dist.ProcessGroup | None = None
) -> None:
    """Raise the same error on every rank if any rank has one; return if none has.

    The message names the ranks that failed, unless all of them failed in the same way. On a rank that failed, its own
    error is chained as the cause.

    Args:
        error: what went wrong on this rank, or None.
        kind: the class raised for an error that is not one of parallel_core; its message then names the original class.
        group: as for `agreement`.
    """
    _raise_together(all_gather(_verdict(error, kind), group), error)


class Comparison:
    """A value that every rank has one of.

    Attributes:
        mine: this rank's; to be set in the block of `comparison`.
        by_rank: the values of all ranks, by rank, once the block has ended.
    """

    mine: Any
    by_rank: list[Any]


@contextmanager
def comparison(kind: type[ParallelCoreError] = RankError) -> Iterator[Comparison]:
    """Run the block on every rank as `agreement` does, and hand on the value that it sets as `mine`.

    Values may be long: as long as all ranks have the same, only hashes are exchanged. They are pickled.

    Args:
        kind: as for `agreement`.

    Raises:
        ParallelCoreError: the block failed somewhere; see `agree`.
    """
    said = Comparison()
    caught: Exception | None = None
    digest = b""
    try:
        yield said
        # Equal values may differ as bytes, by the order of a set, say; that costs a longer message and nothing else.
        digest = hashlib.sha256(pickle.dumps(said.mine)).digest()
    except Exception as error:
        caught = error
    verdicts, digests = zip(*all_gather((_verdict(caught, kind), digest)), strict=True)
    _raise_together(list(verdicts), caught)
    said.by_rank = [said.mine] * len(digests) if len(set(digests)) == 1 else all_gather(said.mine)


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


def _verdict(error: Exception | None, kind: type[ParallelCoreError]) -> Verdict:
    if error is None:
        return None
    if isinstance(error, ParallelCoreError):
        # The nearest class of this package: one of a strategy's own may not be had, or made from a text, elsewhere.
        return next(found for found in type(error).__mro__ if found.__module__ == errors.__name__), str(error)
    return kind, f"{type(error).__name__}: {error}"


def _raise_together(verdicts: list[Verdict], error: Exception | None) -> None:
    """Raise what `agree` says, if there is a verdict on any rank.

    Args:
        verdicts: of all ranks.
        error: this rank's own.
    """
    failed = {index: verdict for index, verdict in enumerate(verdicts) if verdict is not None}
    if not failed:
        return
    error_class = failed[min(failed)][0]
    ranks_by_message: dict[str, list[int]] = {}
    for index, (_, message) in failed.items():
        ranks_by_message.setdefault(message, []).append(index)
    if len(failed) == len(verdicts) and len(ranks_by_message) == 1:
        if isinstance(error, error_class):
            raise error
        raise error_class(next(iter(ranks_by_message))) from error
    lines = [f"{_rank_list(indices, len(verdicts))}: {message}" for message, indices in ranks_by_message.items()]
    raise error_class("\n".join(lines)) from error


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
    staged = message.to(_reachable_device(message.device))
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


def _all_gather_bytes(data: bytes, size: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the first `size` bytes of every rank's data, filled up with zeros."""
    device = _reachable_device(torch.device("cpu"), group)
    mine = torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8).to(device)
    found = torch.empty(_size(group), size, dtype=torch.uint8, device=device)
    with in_contact():
        dist.all_gather(list(found), mine, group=group)
    gathered = found.cpu()
    return [ctypes.string_at(each.data_ptr(), size) for each in gathered]


def _reachable_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device from which a process group can send what lies on `device`.

    A group that was made with NCCL alone has nothing for tensors on the CPU.
    """
    served = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    if device.type in served:
        return device
    return (
        torch.device(served[0], torch.accelerator.current_device_index()) if served[0] != "cpu" else torch.device("cpu")
    )


def _size(group: dist.ProcessGroup | None) -> int:
    # By the group itself: where the default one has been ended meanwhile, a rank must not take itself for alone.
    return world_size() if group is None else group.size()


def _rank_list(indices: list[int], count: int) -> str:
    return f"{'rank' if len(indices) == 1 else 'ranks'} {', '.join(map(str, indices))} of {count}"
