"""Which checkpoints there are."""

from __future__ import annotations

import os
from pathlib import Path

from parallel_core.checkpoint.folder import complete_checkpoints


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint in a folder, or None where there is none; not a collective.

    Args:
        folder: the folder that checkpoints were saved in (`runs/a`). What an interrupted save has left there, and a
            damaged manifest, do not count.
    """
    return next(reversed(complete_checkpoints(Path(folder).absolute())), None)
