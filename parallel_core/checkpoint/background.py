"""Saves that go on while training does: one at a time, and none is lost without a word."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from parallel_core import ranks
from parallel_core.distributed import before_the_end
from parallel_core.errors import CheckpointError

logger = logging.getLogger(__name__)


class CheckpointSave:
    """A save that has been started; one that was not asked to go on in the background is done.

    Attributes:
        path: the checkpoint's folder.
    """

    def __init__(self, path: Path, write: Callable[[], None] | None = None) -> None:
        self.path = path
        self._error: Exception | None = None
        self._seen = False
        self._thread: threading.Thread | None = None
        if write is not None:
            # No daemon: the process does not end before it does.
            self._thread = threading.Thread(target=self._run, args=(write,), name=f"saving {path.name}")
            self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has come to its end, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait for the end of the save, and return the checkpoint's folder; not a collective.

        Raises:
            CheckpointError: it failed; the same error on every rank. A failure that nobody waits for is logged, and
                raised by the next `save_checkpoint` or `load_checkpoint`.
        """
        if self._thread is not None:
            self._thread.join()
        self._seen = True
        if self._error is not None:
            raise CheckpointError(str(self._error)) from self._error
        return self.path

    def unseen_error(self) -> Exception | None:
        """Wait for the end, and return the error that nobody has been told of."""
        if self._thread is not None:
            self._thread.join()
        error, self._seen = None if self._seen else self._error, True
        return error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._error = error
            logger.error("the checkpoint %s could not be saved: %s", self.path, error)


_running: CheckpointSave | None = None


def start(path: Path, write: Callable[[], None]) -> CheckpointSave:
    """Start a save in the background; the one before must have been waited for."""
    global _running
    before_the_end(finish)
    _running = CheckpointSave(path, write)
    return _running


def wait_for_running() -> None:
    """Wait for the save that goes on in the background, if any; a collective.

    Raises:
        CheckpointError: it failed, and some rank has not been told; the same error on every rank.
    """
    global _running
    error = None if _running is None else _running.unseen_error()
    with ranks.agreement(CheckpointError):
        if error is not None:
            assert _running is not None
            raise CheckpointError(f"the checkpoint {_running.path} was not saved, in the background: {error}")
    _running = None


def finish() -> None:
    """Wait for the save that goes on in the background before the process group ends; what it met is logged."""
    if _running is not None:
        _running.unseen_error()


# Weak: a group that torch has ended must not be kept, with its threads and connections.
_apart: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


def group_apart() -> dist.ProcessGroup | None:
    """Return a process group of all ranks, for the CPU, that nothing else talks through; a collective when it is new.

    None in a world of one.
    """
    if ranks.world_size() == 1:
        return None
    world = dist.group.WORLD
    assert world is not None  # there are several ranks
    known = _apart.get(world)
    group = None if known is None else known()
    if group is None:
        group = dist.new_group(backend="gloo")
        _apart[world] = weakref.ref(group)
    return group
