"""What a function may leave behind on a rank: found by comparing before and after."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE = 1.0  # seconds that children and threads which are already ending get


class Before:
    """The state of this process before a call."""

    def __init__(self) -> None:
        self._torch_state = _torch_state()
        self._children = _children()
        self._threads = set(threading.enumerate())

    def leftovers(self, *, own_group: bool) -> tuple[str, ...]:
        """Destroy the process group and return what was left behind, a line each.

        Args:
            own_group: whether the group is the worker's; one that the function made itself is left behind.
        """
        found = []
        if dist.is_initialized():
            if not own_group:
                found.append("an initialised process group (torch.distributed.destroy_process_group() ends it)")
            dist.destroy_process_group()
        found += [
            f"{name} changed from {before} to {now}"
            for (name, before), now in zip(self._torch_state.items(), _torch_state().values(), strict=True)
            if before != now
        ]
        deadline = time.monotonic() + _PATIENCE
        while (running := self._running()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return tuple(found + running)

    def _running(self) -> list[str]:
        children = [f"the child process {pid} ({_command(pid)})" for pid in sorted(_children() - self._children)]
        threads = [
            f"the thread {thread.name!r}"
            for thread in threading.enumerate()
            if thread not in self._threads and not thread.daemon
        ]
        return children + threads


def _torch_state() -> dict[str, Any]:
    return {
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "the number of threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "the float32 matmul precision": torch.get_float32_matmul_precision(),
    }


def _children() -> set[int]:
    """Return the child processes that run."""
    pids = {child.pid for child in multiprocessing.active_children() if child.pid is not None}
    with suppress(OSError):  # not on every system
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):
                pids |= {int(pid) for pid in (task / "children").read_text().split()}
    # Python's own helper for shared memory; it ends with this process.
    pids.discard(getattr(resource_tracker._resource_tracker, "_pid", None))
    return {pid for pid in pids if not _ended(pid)}


def _ended(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return False
    return True


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return "unknown command"
