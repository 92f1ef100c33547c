"""The process group: joined for the length of a block, and ended with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from parallel_core import ranks
from parallel_core.config import DistributedConfigBase
from parallel_core.errors import ProcessGroupError
from parallel_core.wrapping import local_device

if TYPE_CHECKING:
    from parallel_core.config import DistributedConfig

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


_before_the_end: list[Callable[[], None]] = []


def before_the_end(function: Callable[[], None]) -> None:
    """Have a function called on every rank before a process group that `process_group` made is destroyed."""
    if function not in _before_the_end:
        _before_the_end.append(function)


@dataclass(frozen=True)
class Group:
    """Where this process stands among the ranks.

    Attributes:
        rank: 0 to `world_size - 1`.
        local_rank: the rank on this machine, by which the accelerator is chosen.
        world_size: the number of ranks.
        device: where this rank trains.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


@contextmanager
def process_group(config: DistributedConfig) -> Iterator[Group]:
    """Join the ranks that a launcher such as torchrun started, for the length of the block.

    With no launcher this is a world of one, and no process group is made. A process group that is there already is
    used and not destroyed. The default backend is NCCL for tensors on CUDA with gloo for those on the CPU; without CUDA
    it is gloo.

    Args:
        config: `backend` and `timeout_seconds` are used.

    Raises:
        ProcessGroupError: that is no config, the launcher's variables are incomplete or wrong, the backend can't work
            on this machine, or the ranks don't find each other in time.
    """
    if not isinstance(config, DistributedConfigBase):
        raise ProcessGroupError(f"expected a DistributedConfig, found {type(config).__name__}; load_config makes one")
    made_here = _join(config)
    try:
        yield Group(ranks.rank(), int(os.environ.get("LOCAL_RANK", "0")), ranks.world_size(), local_device(config))
    finally:
        if made_here and dist.is_initialized():
            for function in _before_the_end:
                function()
            # A thread of gloo lets go of its last work when it next gets the interpreter. A DDP module that is freed
            # after the group has ended, and before that thread was served, waits for it for ever (torch 2.13).
            time.sleep(0.05)
            dist.destroy_process_group()


def _join(config: DistributedConfig) -> bool:
    """Make the process group that the launcher's variables describe; return whether one was made."""
    if dist.is_initialized():
        return False
    has_accelerator = torch.accelerator.is_available()
    if config.backend == "nccl" and not torch.cuda.is_available():
        raise ProcessGroupError("backend is 'nccl', and no CUDA device is there; allowed here are 'auto' and 'gloo'")
    found = [name for name in LAUNCHER_VARIABLES if name in os.environ]
    # MASTER_ADDR and MASTER_PORT alone are left over in many shells; a rank is what a launcher gives.
    if "RANK" not in found and "WORLD_SIZE" not in found:
        return False
    missing = [name for name in LAUNCHER_VARIABLES if name not in found]
    if missing:
        raise ProcessGroupError(
            f"the environment has {', '.join(found)} and lacks {', '.join(missing)}; start the script with torchrun, "
            f"or set all of them"
        )
    world_size, local_rank = _number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0)
    rank, port = _number("RANK", 0, world_size - 1), _number("MASTER_PORT", 0, 65535)
    device = local_device(config)
    if device.type != "cpu":
        count = torch.accelerator.device_count()
        if local_rank >= count:
            raise ProcessGroupError(
                f"LOCAL_RANK is {local_rank} and this machine has {count} {device.type} devices; start at most {count} "
                f"ranks here, or set backend to 'gloo' to train on the CPU"
            )
        torch.accelerator.set_device_index(local_rank)
    backend = "cpu:gloo,cuda:nccl" if has_accelerator and device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.timeout_seconds)
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]  # not in its __all__
        # The launcher's store outlives the group: a second one must not find the addresses of the first in it. The
        # store does the counting, since processes may have joined other launches before.
        joined = store.add(f"parallel_core/joined/{rank}", 1)
        store = dist.PrefixStore(f"parallel_core/{joined}", store)  # type: ignore[attr-defined]  # as above
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if device.type == "cuda" else None,
        )
        # A rank that failed at once would close the connections that others are still making.
        if store.add("parallel_core/there", 1) == world_size:
            store.set("parallel_core/all there", "")
        store.wait(["parallel_core/all there"], timeout)
    except Exception as error:
        if dist.is_initialized():  # this rank has joined, another one has not
            dist.destroy_process_group()
        reason = next(iter(str(error).splitlines()), "").rstrip(".")
        raise ProcessGroupError(
            f"rank {rank} could not join {world_size} ranks at {os.environ['MASTER_ADDR']}:{port} within "
            f"{config.timeout_seconds} s: {type(error).__name__}: {reason}; check that every rank was started and that "
            f"the port is free"
        ) from error
    return True


def _number(name: str, lowest: int, highest: int | None = None) -> int:
    text = os.environ[name]
    try:
        number = int(text)
    except ValueError:
        raise ProcessGroupError(f"{name} is {text!r}, expected a whole number") from None
    if number < lowest or (highest is not None and number > highest):
        allowed = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
        raise ProcessGroupError(f"{name} is {number}, expected {allowed}")
    return number
