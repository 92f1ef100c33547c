"""Values that ranks hand to each other, over the default process group or another one of all ranks.

Strategies find all of it in `parallel_core.ranks`.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallel_core.errors import RankError

_SHORT = 256  # bytes of a message that all ranks send each other at once
_MARK = b"core"  # its first ones: a rank that is elsewhere in its program may have sent anything
_LENGTH = 4  # the next ones, for the length
_HEADER = len(_MARK) + _LENGTH

_ELSEWHERE = (
    "the ranks are not at the same call: what came from another rank is no answer to this one; every rank must make "
    "every call of parallel_core, in the same order (none of them under `if rank == 0`), and take the same steps"
)


def rank() -> int:
    """Return this process's rank, 0 where there is no process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks, 1 where there is no process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's value, by rank. The values are pickled: small ones only, never tensors.

    Raises:
        RankError: a rank's value can't be pickled; the same error on every rank. Or a rank could not be reached, or is
            at another call.
    """
    if _size(group) == 1:
        return [value]
    # One collective where torch's all_gather_object takes two: nearly all values are short, and most a plain None.
    data = _packed(value)
    found = _all_gather_bytes(_MARK + len(data).to_bytes(_LENGTH) + data, _SHORT, group)
    if not all(each.startswith(_MARK) for each in found):
        raise RankError(_ELSEWHERE)
    lengths = [int.from_bytes(each[len(_MARK) : _HEADER]) for each in found]
    if max(lengths) > _SHORT - _HEADER:
        found = [bytes(_HEADER) + each for each in _all_gather_bytes(data, max(lengths), group)]
    return _unpacked([each[_HEADER : _HEADER + length] for each, length in zip(found, lengths, strict=True)])


def broadcast(value: Any, group: dist.ProcessGroup | None = None) -> Any:
    """Return rank 0's value on every rank; what the other ranks pass is ignored. Pickled, as in `all_gather`.

    Raises:
        RankError: as `all_gather`.
    """
    if _size(group) == 1:
        return value
    packed = [_packed(value) if rank() == 0 else b""]
    with in_contact():
        dist.broadcast_object_list(packed, src=0, group=group)
    return _unpacked(packed)[0]


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
            f"another rank could not be reached: {reason}; look at what the other ranks wrote: one may have ended, or "
            f"be at another call, where every rank must make the same ones"
        ) from error


def reachable_device(device: torch.device, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device from which a process group can send what lies on `device`.

    A group that was made with NCCL alone has nothing for tensors on the CPU.
    """
    served = [entry.split(":")[0] for entry in dist.get_backend_config(group).split(",")]
    if device.type in served:
        return device
    return (
        torch.device(served[0], torch.accelerator.current_device_index()) if served[0] != "cpu" else torch.device("cpu")
    )


class _Unsent(NamedTuple):
    """Goes in the place of a value that can't be pickled: the other ranks wait for something."""

    reason: str


def _packed(value: Any) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:  # whatever a strange object raises
        return pickle.dumps(_Unsent(f"{type(error).__name__}: {error}"))


def _unpacked(packed: list[bytes]) -> list[Any]:
    values = [pickle.loads(each) for each in packed]  # noqa: S301  # from this program's other ranks
    for index, value in enumerate(values):
        if isinstance(value, _Unsent):
            raise RankError(f"rank {index} has a value that can't be sent to the other ranks by pickle: {value.reason}")
    return values


def _all_gather_bytes(data: bytes, size: int, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the first `size` bytes of every rank's data, filled up with zeros."""
    device = reachable_device(torch.device("cpu"), group)
    mine = torch.frombuffer(bytearray(data[:size].ljust(size, b"\0")), dtype=torch.uint8).to(device)
    found = torch.empty(_size(group), size, dtype=torch.uint8, device=device)
    with in_contact():
        dist.all_gather(list(found), mine, group=group)
    gathered = found.cpu()
    return [ctypes.string_at(each.data_ptr(), size) for each in gathered]


def _size(group: dist.ProcessGroup | None) -> int:
    # By the group itself: where the default one has been ended meanwhile, a rank must not take itself for alone.
    return world_size() if group is None else group.size()
