"""Templates as the pool sees them: processes that workers are forked from, and what they tell of these."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Pipe
from typing import IO

from parallel_core.testing import measuring
from parallel_core.testing.template import REQUEST

FIXED_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # ranks share the machine's cores
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else torch.compile keeps a pool of child processes
}

_LEAVE_LIMIT = 10.0  # seconds for a template that has nothing more to do

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from parallel_core.testing.template import main; main(*sys.argv[2:])"
)

# Elsewhere, libraries of the system start threads of their own, which a fork would break.
_FORKS = sys.platform == "linux"


class Templates:
    """Makes workers: forks them from processes that have imported torch, which takes a fresh interpreter seconds.

    There are two templates, for even and for odd ranks. The ranks of a real run have a hash seed each, and a set that
    they walk in different orders must show here too; what is forked has the seed of its template. Where PYTHONHASHSEED
    gives every process the same one, as it would the ranks of a real run, one template is enough.
    """

    def __init__(self) -> None:
        self._running: dict[int, _Template] = {}
        self._all: list[_Template] = []

    def make_worker(self, rank: int, *descriptors: int) -> Child:
        """Ask for a worker; returns at once.

        Args:
            rank: what the worker will be used as.
            descriptors: of its channel to the pool, of the files for its stacks and for its output.
        """
        which = 0 if _one_hash_seed() else rank % 2
        template = self._running.get(which)
        if template is None or template.code() is not None:
            template = _Template()
            self._all.append(template)
            if _FORKS:
                self._running[which] = template
        return Child(template, descriptors)

    def close(self) -> None:
        """End the templates."""
        for template in self._all:
            template.ask_to_leave()
        for template in self._all:
            template.wait_gone()
        self._running.clear()
        self._all.clear()


def _one_hash_seed() -> bool:
    return (os.environ.get("PYTHONHASHSEED") or "random") != "random"


class _Template:
    """One process; where nothing is forked, it becomes the one worker that it is asked for."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        # A file without a name vanishes with the last process that has it open, however the test run ends.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # open for the template's life
        inherited = {name: value for name, value in os.environ.items() if name != "COVERAGE_PROCESS_CONFIG"}
        arguments = (json.dumps(sys.path), str(theirs.fileno()), "forks" if _FORKS else "", measuring.wanted())
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", _BOOT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs.fileno()],
            env={**inherited, **FIXED_ENVIRONMENT},
            # Ctrl-C in a terminal goes to the foreground process group: the pool, not each process, answers it.
            start_new_session=True,
        )
        theirs.close()

    def request(self, descriptors: tuple[int, ...]) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died, which is noticed by whoever waits
            socket.send_fds(self._control, [REQUEST], descriptors)

    def code(self) -> int | None:
        return self._process.poll()

    def output(self) -> str:
        return content(self._output)

    def kill(self) -> None:
        self._process.kill()

    def ask_to_leave(self) -> None:
        self._control.close()

    def wait_gone(self) -> None:
        try:
            self._process.wait(_LEAVE_LIMIT)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        self._output.close()


class Child:
    """A worker's process, as its template tells of it."""

    def __init__(self, template: _Template, descriptors: tuple[int, ...]) -> None:
        self._template = template
        self._told: list[int] = []  # the process id, then the exit code
        self._channel, theirs = Pipe(duplex=False)
        template.request((*descriptors, theirs.fileno()))
        theirs.close()

    def pid(self) -> int | None:
        """Return the process id, which is that of the process group too, or None before the process is there."""
        self._listen()
        return self._told[0] if self._told else None

    def code(self) -> int | None:
        """Return the exit code, or None while the process runs or is yet to be made."""
        self._listen()
        # Where the template is gone, either the two are one process, or nobody watches this one: it can't be used.
        return self._told[1] if len(self._told) == 2 else self._template.code()

    def wait(self, seconds: float = float("inf")) -> int | None:
        """Wait for the end, at most some seconds; return the exit code, or None if it runs on."""
        end = time.monotonic() + seconds
        while (code := self.code()) is None and time.monotonic() < end:
            self._channel.poll(0.05)
        return code

    def kill(self) -> None:
        """Stop the process and its children at once."""
        pid = self.pid()
        if pid is None:
            self._template.kill()  # it did not get so far, and must not make a process that nobody waits for
        elif len(self._told) < 2:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self.wait()
        self._channel.close()

    def output(self) -> str:
        """Return what the template wrote, if it failed before it made the process."""
        return self._template.output() if self.pid() is None else ""

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while len(self._told) < 2 and self._channel.poll():
                self._told.append(int(self._channel.recv_bytes()))


def content(file: IO[bytes]) -> str:
    """Return all of a file that is being written to."""
    descriptor = file.fileno()
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
