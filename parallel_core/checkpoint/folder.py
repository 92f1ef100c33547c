"""A checkpoint's folder: built beside its place under a name that starts with a dot, then put there in one step.

Whatever happens, what stands at the place is a whole checkpoint, the new one or the one before. What a killed process
leaves beside it is told by its name, and by nobody holding a lock on it any more.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from parallel_core.checkpoint.file_system import exchange, lock, sync
from parallel_core.checkpoint.manifest import MANIFEST, Manifest, has_manifest, read_manifest
from parallel_core.errors import CheckpointError

SAVING, REPLACED = "saving", "replaced"
# Exactly this: a user's folder may have a name that is nearly of the kind.
_BESIDE = re.compile(r"\.(?P<name>[^.].*)\.(?P<kind>saving|replaced)-[0-9a-f]{8}", re.DOTALL)
LONGEST_NAME = 255 - len("..replaced-01234567")  # bytes; file systems have room for 255
_WRITTEN = re.compile(
    r"(model|optimizer|objects)(-rank-\d+-of-\d+|-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
    r"|random-states\.json"
)


def path_of(path: Any, what: str, *, if_none: str = "") -> Path:
    """Return what a caller has named as an absolute path.

    Args:
        path: what was passed, which may be no path.
        what: the argument's name.
        if_none: what the error says besides, where None was passed.

    Raises:
        CheckpointError: it is no name that a folder can have.
    """
    with suppress(TypeError, ValueError):  # of another kind than text, or text that no file system can have
        if os.fspath(path) and b"\0" not in os.fsencode(path):
            return Path(path).absolute()
    raise CheckpointError(f"{what}: expected the name of a folder, found {path!r}{if_none if path is None else ''}")


def checkpoint_path(path: str | os.PathLike[str]) -> Path:
    """Return the place of a checkpoint as an absolute path.

    Raises:
        CheckpointError: it is no name that a checkpoint's folder can have.
    """
    place = path_of(path, "path")
    if place.name in ("", "..") or place.name.startswith("."):
        raise CheckpointError(
            f"path: {str(path)!r} can't be a checkpoint's folder; choose a name without a leading dot"
        )
    if (length := len(os.fsencode(place.name))) > LONGEST_NAME:
        raise CheckpointError(
            f"path: the name {place.name!r} has {length} bytes, and at most {LONGEST_NAME} are possible: while a "
            f"checkpoint is built it has a longer one; choose a shorter name"
        )
    return place


def check_place(place: Path) -> None:
    """Make sure that a checkpoint may be saved at a place.

    Raises:
        CheckpointError: something stands there that is no checkpoint, or a checkpoint with something else in it.
    """
    above = next(parent for parent in place.parents if parent.exists())
    if not above.is_dir():
        raise CheckpointError(f"{place}: {above} is no folder; choose another name")
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise CheckpointError(f"{place} is there and is no folder; choose another name")
    if not place.is_dir() or not any(place.iterdir()):
        return
    if not has_manifest(place):
        why = f"its {MANIFEST} is that of another program" if (place / MANIFEST).exists() else f"it lacks {MANIFEST}"
        raise CheckpointError(f"{place} is there and is no checkpoint: {why}; move it away, or choose another name")
    if found := strangers(place):
        listed = ", ".join(map(repr, found[:3])) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        raise CheckpointError(
            f"{place} is a checkpoint with something else in it: {listed}; move that away, or choose another name"
        )


def strangers(folder: Path, manifest: Manifest | None = None) -> list[str]:
    """Return the names of what lies in a checkpoint's folder and was not saved there.

    Args:
        folder: where it lies.
        manifest: its manifest, if it has been read.
    """
    with suppress(CheckpointError):
        manifest = manifest or read_manifest(folder)
    names = sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)
    if manifest is None:  # damaged: what a save may have written is told by its name
        return [name for name in names if not _WRITTEN.fullmatch(name)]
    files = {file.name for file in manifest.files}
    return [name for name in names if name not in files]


@contextmanager
def folder_to_build(place: Path) -> Iterator[Path]:
    """Make the folder that a checkpoint is built in, and remove what has that name at the end of the block.

    Folders that killed processes have left in the same folder are removed first.

    Raises:
        OSError: it can't be made.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    clean(place.parent)
    folder = beside(place, SAVING)
    folder.mkdir()
    while (held := lock(folder)) is None:  # somebody cleaned it away before it was locked
        folder.mkdir(exist_ok=True)
    try:
        yield folder
    finally:
        os.close(held)
        shutil.rmtree(folder, ignore_errors=True)


def publish(folder: Path, place: Path) -> None:
    """Put a finished folder in its place, for good; a checkpoint that stands there is replaced by it, and removed.

    Raises:
        OSError: it can't be put there; what stood there still does.
    """
    sync(folder)
    if not place.exists():
        folder.rename(place)
    elif not exchange(folder, place):
        # Between these two a reader finds the one before under its other name: see `standing`.
        place.rename(old := beside(place, REPLACED))
        try:
            folder.rename(place)
        except OSError:
            old.rename(place)
            raise
    sync(place.parent)
    for old, of in moved(place.parent, REPLACED):
        if of == place:
            shutil.rmtree(old, ignore_errors=True)


def standing(place: Path) -> Path:
    """Return where the checkpoint of a place lies: there, or beside it if a replacement was cut off half way."""
    if not place.exists():
        for old, of in moved(place.parent, REPLACED):
            if of == place:
                return old
    return place


def clean(parent: Path) -> None:
    """Remove what killed processes have left in a folder, and put back what they had moved away."""
    for leftover, _ in moved(parent, SAVING):
        if (held := lock(leftover, wait=False)) is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(held)
    for old, place in moved(parent, REPLACED):
        if place.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            with suppress(OSError):
                old.rename(place)


def beside(place: Path, kind: str) -> Path:
    """Return a new name for a folder beside a place, which tells what it is there for."""
    return place.with_name(f".{place.name}.{kind}-{secrets.token_hex(4)}")


def moved(parent: Path, kind: str) -> list[tuple[Path, Path]]:
    """Return the folders in another that have a name of `beside`, each with its place; a replaced one is whole."""
    found = []
    for path in parent.glob(f".*.{kind}-*"):
        name = _BESIDE.fullmatch(path.name)
        if name is None or name["kind"] != kind or path.is_symlink() or not path.is_dir():
            continue
        if kind == SAVING or has_manifest(path):
            found.append((path, path.with_name(name["name"])))
    return found
