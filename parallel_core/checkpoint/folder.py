"""A checkpoint's folder: built beside its place under a name that starts with a dot, then put there in one step.

Whatever happens, what stands at the place is a whole checkpoint, the new one or the one before. What a killed process
leaves beside it is told by its name, and by nobody holding a lock on it any more.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from parallel_core.checkpoint.manifest import MANIFEST, read_manifest
from parallel_core.errors import CheckpointError

SAVING, REPLACED = ".saving-", ".replaced-"

_EXCHANGE = 2  # RENAME_EXCHANGE of Linux's renameat2
_AT_FDCWD = -100


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Return the place of a checkpoint as an absolute path.

    Raises:
        CheckpointError: it is no name that a folder can have.
    """
    if not str(path):
        raise CheckpointError("path: expected the name of a folder, found ''")
    place = Path(path).absolute()
    if place.name in ("", "..") or place.name.startswith("."):
        raise CheckpointError(
            f"path: {str(path)!r} can't be a checkpoint's folder; choose a name without a leading dot"
        )
    return place


def check_place(place: Path) -> None:
    """Make sure that a checkpoint may be saved at a place.

    Raises:
        CheckpointError: something stands there that is no checkpoint.
    """
    above = next(parent for parent in place.parents if parent.exists())
    if not above.is_dir():
        raise CheckpointError(f"{place}: {above} is no folder; choose another name")
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise CheckpointError(f"{place} is there and is no folder; choose another name")
    if place.is_dir() and not (place / MANIFEST).is_file() and any(place.iterdir()):
        raise CheckpointError(
            f"{place} is there and is no checkpoint: it lacks {MANIFEST}; move it away, or choose another name"
        )


@contextmanager
def folder_to_build(place: Path) -> Iterator[Path]:
    """Make the folder that a checkpoint is built in, and remove what has that name at the end of the block.

    Folders that killed processes have left in the same folder are removed first.

    Raises:
        OSError: it can't be made.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    clean(place.parent)
    folder = _beside(place, SAVING)
    folder.mkdir()
    while (lock := _lock(folder)) is None:  # somebody cleaned it away before it was locked
        folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, place: Path) -> None:
    """Put a finished folder in its place, for good; a checkpoint that stands there is replaced by it, and removed.

    Raises:
        OSError: it can't be put there; what stood there still does.
    """
    sync(folder)
    if not place.exists():
        folder.rename(place)
    elif not _exchange(folder, place):
        # Between these two a reader finds the one before under its other name: see `standing`.
        place.rename(old := _beside(place, REPLACED))
        try:
            folder.rename(place)
        except OSError:
            old.rename(place)
            raise
    sync(place.parent)
    for old in _others(place, REPLACED):
        shutil.rmtree(old, ignore_errors=True)


def standing(place: Path) -> Path:
    """Return where the checkpoint of a place lies: there, or beside it if a replacement was cut off half way."""
    if not place.exists():
        for old in _others(place, REPLACED):
            if (old / MANIFEST).is_file():
                return old
    return place


def clean(parent: Path) -> None:
    """Remove what killed processes have left in a folder, and put back what they had moved away."""
    for leftover in parent.glob(f".*{SAVING}*"):
        if (lock := _lock(leftover, wait=False)) is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(lock)
    for old in parent.glob(f".*{REPLACED}*"):
        place = _place_of(old)
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            with suppress(OSError):
                old.rename(place)


def complete_checkpoints(parent: Path) -> list[Path]:
    """Return the places of the complete checkpoints in a folder, the oldest first; none where it is not there."""
    places = {manifest.parent for manifest in parent.glob(f"*/{MANIFEST}") if not manifest.parent.name.startswith(".")}
    places |= {_place_of(old) for old in parent.glob(f".*{REPLACED}*")}
    found = []
    for place in places:
        with suppress(CheckpointError):  # a damaged one is not complete
            found.append((read_manifest(standing(place)).saved_at, place.name, place))
    return [place for _, _, place in sorted(found)]


def prune(place: Path, keep_last: int) -> None:
    """Remove the oldest checkpoints beside the one at a place, until with it there are `keep_last`."""
    others = [folder for folder in complete_checkpoints(place.parent) if folder != place]
    for folder in others[: max(0, len(others) + 1 - keep_last)]:
        # Renamed first: a folder that is half removed must not pass for a checkpoint.
        doomed = _beside(folder, SAVING)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def sync(path: Path) -> None:
    """Make sure that a folder's entries are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # some file systems have no such thing for a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _beside(place: Path, kind: str) -> Path:
    return place.with_name(f".{place.name}{kind}{secrets.token_hex(4)}")


def _place_of(moved: Path) -> Path:
    return moved.with_name(moved.name[1:].rpartition(REPLACED)[0])


def _others(place: Path, kind: str) -> list[Path]:
    prefix = f".{place.name}{kind}"
    return [path for path in place.parent.glob(".*") if path.name.startswith(prefix)]


def _lock(folder: Path, *, wait: bool = True) -> int | None:
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


def _exchange(one: Path, other: Path) -> bool:
    """Let two folders change places in one step; return False where the system can't."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if rename is None:
        return False
    return bool(rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0)
