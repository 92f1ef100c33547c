"""Files that may come from anyone: opened only if they are files, and read as JSON without a way to break out."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from parallel_core.errors import CheckpointError

_T = TypeVar("_T")


@contextmanager
def told_of_reading(path: Path) -> Iterator[None]:
    """Say what could not be read.

    Raises:
        CheckpointError: the block failed with an error of the system: a name is too long, say.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error.strerror or error}") from error


def size_of(path: Path) -> int:
    """Return the size of a file, in bytes.

    Raises:
        CheckpointError: there is none, or it is something else: to open a pipe is to wait for somebody who writes.
    """
    with told_of_reading(path):
        found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        what = "Is a directory" if stat.S_ISDIR(found.st_mode) else "it is a pipe or a device"
        raise CheckpointError(f"{path} can't be read: {what}")
    return found.st_size


def open_file(path: Path) -> int:
    """Return the descriptor of a file that has been opened to be read.

    Raises:
        CheckpointError: as `size_of`.
    """
    size_of(path)
    with told_of_reading(path):
        return os.open(path, os.O_RDONLY)


def read_file(path: Path) -> bytes:
    """Return the content of a small file.

    Raises:
        CheckpointError: as `size_of`.
    """
    size_of(path)
    with told_of_reading(path):
        return path.read_bytes()


def parsed(text: bytes | msgspec.Raw, kind: type[_T], problem: str) -> _T:
    """Return what JSON says, as a thing of some kind.

    Args:
        text: the JSON.
        kind: what is expected.
        problem: how the error begins.

    Raises:
        CheckpointError: it is none, says something else, or is nested deeper than Python goes.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{problem}: {error}") from error
