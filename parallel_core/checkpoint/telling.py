"""One class for whatever goes wrong with a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from parallel_core.errors import CheckpointError, RankError, StateDictError, WrapError


@contextmanager
def as_checkpoint_error() -> Iterator[None]:
    """Raise as a `CheckpointError` what the block raises of other kinds about state and ranks.

    Raises:
        CheckpointError: a rank has gone, an optimizer does not belong to the model, or that is not the whole model.
    """
    try:
        yield
    except (RankError, StateDictError, WrapError) as error:
        raise CheckpointError(str(error)) from error
