"""One worker as the pool sees it: start it, talk to it, look at it, stop it."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

from parallel_core.testing.payload import packed, unpacked
from parallel_core.testing.protocol import READY, Died, Leave
from parallel_core.testing.template_process import Templates, content

START_LIMIT = 120.0  # seconds for a template to import torch on a busy machine
_LEAVE_LIMIT = 10.0  # seconds for an idle worker to end by itself
_STACK_LIMIT = 2.0  # seconds for a worker to write its stacks


class WorkerProcess:
    """A process that waits for calls; it leads a process group of its own, so that it and its children die together."""

    def __init__(self, templates: Templates, rank: int) -> None:
        self._connection, theirs = Pipe(duplex=True)
        # Files without a name vanish with the last process that has them open, however the test run ends.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # open for the worker's life
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  # open for the worker's life
        self._child = templates.make_worker(rank, theirs.fileno(), self._stacks.fileno(), self._output.fileno())
        theirs.close()
        self._deadline = time.monotonic() + START_LIMIT
        self._ready = False

    @property
    def connection(self) -> Connection[Any, Any]:
        """The channel, for ``multiprocessing.connection.wait``."""
        return self._connection

    def wait_ready(self) -> None:
        """Wait until the worker takes calls.

        Raises:
            RuntimeError: it died or did not get ready in time.
        """
        while not self._ready:
            if self._connection.poll(0.1):
                with suppress(EOFError, OSError):
                    self._ready = self._connection.recv_bytes() == READY
            if not self._ready and (not self.alive() or time.monotonic() > self._deadline):
                state = self.exit_text() if not self.alive() else f"it was not ready after {START_LIMIT:.0f} s"
                output = self._child.output() + self.output()
                self.kill()
                raise RuntimeError(f"a worker process for the ranks did not start: {state}; it wrote:\n{output}")

    def alive(self) -> bool:
        """Tell whether the process runs."""
        return self._child.code() is None

    def send(self, message: object) -> None:
        """Send a message; a worker that is gone is noticed when its answer is awaited."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self._connection.send_bytes(packed(message))

    def receive(self) -> Any:
        """Return the next message, or :class:`Died` when the worker is gone."""
        try:
            return unpacked(self._connection.recv_bytes())
        except (EOFError, OSError):
            return Died()

    def clear(self) -> None:
        """Forget what the worker wrote so far."""
        for file in (self._output, self._stacks):
            # The worker shares the file's offset, so it goes on writing at the start.
            os.ftruncate(file.fileno(), 0)
            os.lseek(file.fileno(), 0, os.SEEK_SET)

    def output(self) -> str:
        """Return what the worker wrote to stdout and stderr."""
        return content(self._output)

    def written_stacks(self) -> str:
        """Return the stacks that a worker left which crashed, empty if it ended otherwise."""
        return content(self._stacks)

    def stacks(self) -> str:
        """Return the Python stacks of all of the worker's threads as they are now, empty if there is no answer."""
        pid = self._child.pid()
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACK_LIMIT
        text = ""
        while time.monotonic() < deadline:
            before, text = text, self.written_stacks()
            if text and text == before:
                break
            time.sleep(0.05)
        return text

    def exit_text(self) -> str:
        """Say how the process ended."""
        code = self._child.wait()
        if code is None or code >= 0:
            return f"the process ended with exit code {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        return f"the process was ended by {name}"

    def kill(self) -> None:
        """Stop the process and its children at once."""
        self._child.kill()
        self._connection.close()
        self._output.close()
        self._stacks.close()

    def ask_to_leave(self) -> None:
        """Let the worker end by itself, so that it can save what it measured."""
        self.send(Leave())

    def wait_gone(self) -> None:
        """Wait for a worker that was asked to leave; one that does not is killed, and so are its children."""
        self._child.wait(_LEAVE_LIMIT)
        self.kill()
