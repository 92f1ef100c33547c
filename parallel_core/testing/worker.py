"""The worker's side: a process that runs one call after the other."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import select
import signal
import sys
import threading
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from parallel_core.testing.leftovers import Before
from parallel_core.testing.measuring import Measuring
from parallel_core.testing.payload import packed, packed_exception, packed_result, unpacked
from parallel_core.testing.protocol import READY, Call, Raised, Returned, Settled
from parallel_core.testing.surroundings import surroundings

SEED = 0
"""What the generators of random numbers are seeded with at the start of each call, on every rank."""

_SLACK = 60.0  # seconds by which this process's own limits come after the pool's, which tells more


def main(connection_fd: int, stacks_fd: int) -> None:
    """Serve calls until told to leave.

    Args:
        connection_fd: file descriptor of the channel to the pool.
        stacks_fd: file descriptor that the stacks of all threads are written to on SIGUSR1 and on a crash.
    """
    del sys.argv[1:]
    for descriptor in (connection_fd, stacks_fd):
        os.set_inheritable(descriptor, False)  # a child process of the function's must not keep them open
    Worker(Connection(connection_fd), stacks_fd).run()


class Worker:
    """The process as a whole: answers calls one after the other."""

    def __init__(self, connection: Connection[Any, Any], stacks_fd: int) -> None:
        self._connection = connection
        self._stacks_fd = stacks_fd
        self._modules = 0
        threading.Thread(target=die_with_the_pool, args=(connection.fileno(),), daemon=True).start()
        faulthandler.enable(file=stacks_fd)
        faulthandler.register(signal.SIGUSR1, file=stacks_fd)

    def run(self) -> None:
        """Say that this process is ready, and serve calls until a message is none."""
        measuring = Measuring()
        self._collect()
        self._connection.send_bytes(READY)
        while isinstance(call := unpacked(self._connection.recv_bytes()), Call):
            measuring.follow(call.coverage)
            with surroundings(call):
                self._serve(call)
            measuring.save()

    def _serve(self, call: Call) -> None:
        # Where the interpreter itself is stuck, the watching thread does not run; this one needs no interpreter.
        faulthandler.dump_traceback_later(call.timeout + _SLACK, exit=True, file=self._stacks_fd)
        random.seed(SEED)
        torch.manual_seed(SEED)
        if (numpy := sys.modules.get("numpy")) is not None:
            numpy.random.seed(SEED)
        before = Before()
        self._connection.send_bytes(packed(answer_of(call)))
        # The pool sends Settle. A rank that left its group before would break the collectives of the others.
        self._connection.recv_bytes()
        self._collect()
        self._connection.send_bytes(packed(Settled(before.leftovers(own_group=call.store is not None))))
        faulthandler.cancel_dump_traceback_later()

    def _collect(self) -> None:
        """Free models and data loaders in reference cycles: they hold process groups and child processes."""
        gc.collect()
        if len(sys.modules) != self._modules:
            # What an import brings stays. Looking through all that torch brings would cost every call 0.1 s.
            gc.freeze()
            self._modules = len(sys.modules)


def die_with_the_pool(descriptor: int) -> None:
    """Wait until the other end of the channel is closed, however its process ended; then kill this process group."""
    poll = select.poll()
    poll.register(descriptor, 0)  # no events asked for: only the other end's closing is reported
    poll.poll()
    os.killpg(0, signal.SIGKILL)


def answer_of(call: Call) -> Returned | Raised:
    """Run the function of a call, in a process group if the call says so."""
    try:
        if "nccl" in call.backend:
            _use_gpu(call)
        if call.store is not None:
            dist.init_process_group(
                call.backend,
                store=dist.FileStore(call.store, call.world_size),  # type: ignore[attr-defined]  # not in its __all__
                rank=call.rank,
                world_size=call.world_size,
                timeout=timedelta(seconds=call.timeout + _SLACK),
            )
        function, args, kwargs = unpacked(call.function)
        return Returned(packed_result(function(*args, **kwargs)))
    except BaseException as error:  # SystemExit and what pytest.fail raises are answers too
        return _raised(error)


def _use_gpu(call: Call) -> None:
    found = torch.cuda.device_count()
    if found < call.world_size:
        raise RuntimeError(f"backend {call.backend!r} needs one GPU a rank: found {found} for {call.world_size} ranks")
    torch.cuda.set_device(call.rank)


def _raised(error: BaseException) -> Raised:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    below = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this module's frame
    text = "".join(traceback.format_exception(kind, error, below or error.__traceback__))
    try:
        message = str(error)
    except Exception as fault:  # an exception's own __str__
        message = f"(its message could not be had: {fault!r})"
    return Raised(error_type=name, message=message, traceback=text, exception=packed_exception(error))
