"""What a file system does with folders: lock one, let two change places, bring one to the disk."""

from __future__ import annotations

import ctypes
import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux's renameat2
_AT_FDCWD = -100


def sync(path: Path) -> None:
    """Make sure that a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no such thing for a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(folder: Path, *, wait: bool = True) -> int | None:
    """Lock a folder and return what must be closed to unlock it.

    The kernel lets go of a lock when its process ends, however that happens. None is returned where the folder has gone
    meanwhile; without waiting, also where another process has it, or where the file system knows no locks, so that
    nobody can tell.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if wait:
            return descriptor
        os.close(descriptor)
        return None
    with suppress(FileNotFoundError):
        if folder.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    os.close(descriptor)
    return None


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; return False where the system can't."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0)
