"""The template's side: a process that has imported what ranks need, and that workers are forked from."""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from parallel_core.testing.measuring import begin
from parallel_core.testing.preload import import_torch

REQUEST = b"a worker, please"
"""The pool's message; four descriptors come with it."""


def main(control_fd: str, forks: str, coverage: str) -> None:
    """Import torch, then make a worker for each request, until the pool closes the socket; ends this process.

    With a request come the descriptors of the worker's channel to the pool, of the files for its stacks and for its
    output, and of a channel on which the pool is told the worker's process id and, when it has ended, its exit code.

    Args:
        control_fd: file descriptor of the socket on which requests come.
        forks: empty if this process is to become the first worker itself, where a fork of it can't be trusted.
        coverage: how to measure coverage, from `measuring.wanted`; empty if nothing is measured.
    """
    import_torch()
    if coverage:
        # Not sooner, as measuring slows the imports down. A forked process goes on, with a file of its own.
        begin(coverage)
    control = socket.socket(fileno=int(control_fd))
    control.set_inheritable(False)
    descriptors = _Template(control).serve() if forks else _become_a_worker(control)
    if descriptors is not None:
        # Imported by each worker, so that coverage sees it.
        from parallel_core.testing import worker

        worker.main(*descriptors)
    # As an interpreter ends, but without taking all of torch apart, which takes a fifth of the time that importing did.
    atexit._run_exitfuncs()
    os._exit(0)


class _Template:
    """The process and the workers that are its children. It has one thread: a fork takes no other along."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._lives: dict[int, Connection[Any, Any]] = {}
        # Python writes to this when a child has ended, so that one poll waits for both.
        self._bell, self._ringer = socket.socketpair()
        for end in (self._bell, self._ringer):
            end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._ringer.fileno())

    def serve(self) -> tuple[int, int] | None:
        """Fork, and see workers off; returns in a worker, with two of its descriptors, and at the end, with None."""
        ready = select.poll()
        for end in (self._control, self._bell):
            ready.register(end, select.POLLIN)
        while True:
            events = dict(ready.poll())
            if self._bell.fileno() in events:
                self._bell.recv(1024)
                self._see_off()
            if self._control.fileno() in events:
                descriptors = _request(self._control)
                if descriptors is None:
                    return None
                if self._fork(*descriptors) == 0:
                    return descriptors[0], descriptors[1]

    def _fork(self, connection: int, stacks: int, output: int, life: int) -> int:
        channel: Connection[Any, Any] = Connection(life, readable=False)
        pid = os.fork()
        # Done by both, as either may be the first that has to rely on it.
        with suppress(OSError):
            os.setpgid(pid, pid)
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for end in (self._control, self._bell, self._ringer):
                end.close()
            for each in (channel, *self._lives.values()):
                each.close()
            _write_to(output)
            return pid
        for descriptor in (connection, stacks, output):
            os.close(descriptor)
        self._lives[pid] = channel
        _tell(channel, pid)
        return pid

    def _see_off(self) -> None:
        """Tell of each worker that has ended; end its children too, while nobody else can have its group's id."""
        while self._lives and (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            with suppress(OSError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            channel = self._lives.pop(ended.si_pid)
            _tell(channel, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
            channel.close()
            os.waitpid(ended.si_pid, 0)


def _become_a_worker(control: socket.socket) -> tuple[int, int] | None:
    descriptors = _request(control)
    if descriptors is None:
        return None
    connection, stacks, output, life = descriptors
    _write_to(output)
    _tell(Connection(life, readable=False), os.getpid())
    return connection, stacks


def _request(control: socket.socket) -> list[int] | None:
    """Return the descriptors that come with the next request, or None if there will be none."""
    message, descriptors, _, _ = socket.recv_fds(control, len(REQUEST), 4)
    return descriptors if message else None


def _tell(channel: Connection[Any, Any], number: int) -> None:
    with suppress(OSError):  # the pool has given this worker up
        channel.send_bytes(str(number).encode())


def _write_to(output: int) -> None:
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
