"""Which checkpoints there are, and which of them have had their time."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path

from parallel_core.checkpoint.folder import REPLACED, SAVING, beside, moved, path_of, standing, strangers
from parallel_core.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from parallel_core.checkpoint.untrusted import told_of_reading
from parallel_core.errors import CheckpointError

logger = logging.getLogger(__name__)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None where there is none; not a collective.

    Args:
        folder: the folder that checkpoints were saved in (`runs/a`). What an interrupted save has left there, and a
            damaged manifest, do not count. A link to a checkpoint does, after the checkpoint itself.

    Raises:
        CheckpointError: the folder can't be read, is a file, or that is no name of one.
    """
    place = path_of(folder, "folder")
    with told_of_reading(place):
        try:
            os.scandir(place).close()  # as a glob finds nothing in a file, and in a folder that may not be read
        except FileNotFoundError:
            return None
        found = _complete(place)
    return found[-1][0] if found else None


def prune(place: Path, keep_last: int) -> None:
    """Remove the oldest checkpoints beside the one at a place, until with it there are `keep_last`.

    Links, and checkpoints with something else in their folder, are neither counted nor touched. What can't be removed
    stays, and is logged.
    """
    others = []
    for other, manifest in _complete(place.parent):
        with suppress(OSError):  # somebody else has removed it
            if other != place and not other.is_symlink() and not strangers(standing(other), manifest):
                others.append(other)
    for other in others[: max(0, len(others) + 1 - keep_last)]:
        # Renamed first: a folder that is half removed must not pass for a checkpoint.
        doomed = beside(other, SAVING)
        try:
            standing(other).rename(doomed)
        except OSError as error:
            logger.warning("the checkpoint %s has had its time, and can't be removed: %s", other, error.strerror)
        shutil.rmtree(doomed, ignore_errors=True)


def _complete(parent: Path) -> list[tuple[Path, Manifest]]:
    """Return the places and manifests of the complete checkpoints in a folder, the oldest first."""
    places = {manifest.parent for manifest in parent.glob(f"*/{MANIFEST}") if not manifest.parent.name.startswith(".")}
    places |= {place for _, place in moved(parent, REPLACED)}
    found = []
    for place in places:
        with suppress(CheckpointError):  # a damaged one is not complete
            found.append((place, read_manifest(standing(place))))
    return sorted(found, key=lambda each: (each[1].saved_at, not each[0].is_symlink(), each[0].name))
