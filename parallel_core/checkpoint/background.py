"""Saves that go on while training does: one at a time, and none is lost without a word."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
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
        self._ended = threading.Event()
        if write is None:
            self._ended.set()
        else:
            # No daemon: the process does not end before it does. And never joined: a join that Ctrl-C interrupts leaves
            # a thread that counts as ended (Python 3.11), here and at the end of the process.
            threading.Thread(target=self._run, args=(write, _world()), name=f"saving {path.name}").start()

    @property
    def done(self) -> bool:
        """Whether it has come to its end, well or not."""
        return self._ended.is_set()

    def wait(self) -> Path:
        """Wait for the end of the save, and return the checkpoint's folder; not a collective.

        Raises:
            CheckpointError: it failed; the same error on every rank. A failure that nobody waits for is logged, and
                raised by the next `save_checkpoint` or `load_checkpoint`.
        """
        self._ended.wait()
        self._seen = True
        if self._error is not None:
            raise CheckpointError(str(self._error)) from self._error
        return self.path

    def unseen_error(self) -> Exception | None:
        """Wait for the end, and return the error that nobody has been told of."""
        self._ended.wait()
        error, self._seen = None if self._seen else self._error, True
        return error

    def _run(self, write: Callable[[], None], world: dist.ProcessGroup | None) -> None:
        try:
            write()
        except Exception as error:
            self._error = error
            if world is not None and _world() is not world:  # what torch says then is about its own tables
                self._error = CheckpointError(
                    "the process group was ended while a save in the background needed it; wait for the save before, "
                    "or let the group be ended by parallel_core.process_group, which does"
                )
                self._error.__cause__ = error
            logger.error("the checkpoint %s could not be saved: %s", self.path, self._error)
        finally:
            self._ended.set()


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
    world = _world()
    if world is None or world.size() == 1:
        return None
    known = _apart.get(world)
    group = None if known is None else known()
    if group is None:
        with ranks.in_contact():
            group = dist.new_group(backend="gloo", timeout=_timeout(world))
        _apart[world] = weakref.ref(group)
    return group


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_available() else None


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return how long a process group waits for a rank, None where its backend does not tell."""
    device = dist.get_backend_config(group).split(":")[0]
    options = getattr(group._get_backend(torch.device(device)), "options", None)  # torch has no public way
    return getattr(options, "_timeout", None)
