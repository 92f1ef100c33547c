"""Ranks agree: on errors, so that one is raised on all of them, and on values that each of them has.

Strategies find all of it in `parallel_core.ranks`.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from parallel_core import errors
from parallel_core.errors import ParallelCoreError, RankError
from parallel_core.messages import all_gather

T = TypeVar("T")

# What went wrong on a rank: the class to raise, and the message.
Verdict = tuple[type[ParallelCoreError], str] | None


@contextmanager
def agreement(kind: type[ParallelCoreError] = RankError, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run the block on every rank; if it fails on any of them, raise one and the same error on all.

    The block must not contain a collective that a failing rank would miss.

    Args:
        kind: the class of the error raised for a failure that is not an error of parallel_core.
        group: the process group of all ranks to agree through; by default the default one.

    Raises:
        ParallelCoreError: the block failed somewhere; see `agree`.
    """
    caught: Exception | None = None
    try:
        yield
    except Exception as error:
        caught = error
    agree(caught, kind, group)


def agree(
    error: Exception | None, kind: type[ParallelCoreError] = RankError, group: dist.ProcessGroup | None = None
) -> None:
    """Raise the same error on every rank if any rank has one; return if none has.

    The message names the ranks that failed, unless all of them failed in the same way. On a rank that failed, its own
    error is chained as the cause.

    Args:
        error: what went wrong on this rank, or None.
        kind: the class raised for an error that is not one of parallel_core; its message then names the original class.
        group: as for `agreement`.
    """
    verdict = _verdict(error, kind)
    _raise_together(_sent(verdict, verdict, error, group), error)


class Comparison:
    """A value that every rank has one of.

    Attributes:
        mine: this rank's; to be set in the block of `comparison`.
        by_rank: the values of all ranks, by rank, once the block has ended.
    """

    mine: Any
    by_rank: list[Any]


@contextmanager
def comparison(kind: type[ParallelCoreError] = RankError) -> Iterator[Comparison]:
    """Run the block on every rank as `agreement` does, and hand on the value that it sets as `mine`.

    Values may be long: as long as all ranks have the same, only hashes are exchanged. They are pickled.

    Args:
        kind: as for `agreement`.

    Raises:
        ParallelCoreError: the block failed somewhere; see `agree`.
    """
    said = Comparison()
    caught: Exception | None = None
    digest = b""
    try:
        yield said
        # Equal values may differ as bytes, by the order of a set, say; that costs a longer message and nothing else.
        digest = hashlib.sha256(pickle.dumps(said.mine)).digest()
    except Exception as error:
        caught = error
    verdict = _verdict(caught, kind)
    verdicts, digests = zip(*_sent((verdict, digest), verdict, caught), strict=True)
    _raise_together(list(verdicts), caught)
    said.by_rank = [said.mine] * len(digests) if len(set(digests)) == 1 else all_gather(said.mine)


def _sent(mine: T, verdict: Verdict, error: Exception | None, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what every rank sends, by rank; where they can't be reached, raise what went wrong on this one."""
    try:
        return all_gather(mine, group)
    except RankError as lost:
        if verdict is None:
            raise
        kind, message = verdict
        raise kind(f"{message}\nThe other ranks could not be told: {lost}") from error


def _verdict(error: Exception | None, kind: type[ParallelCoreError]) -> Verdict:
    if error is None:
        return None
    if isinstance(error, ParallelCoreError):
        # The nearest class of this package: one of a strategy's own may not be had, or made from a text, elsewhere.
        return next(found for found in type(error).__mro__ if found.__module__ == errors.__name__), str(error)
    return kind, f"{type(error).__name__}: {error}"


def _raise_together(verdicts: list[Verdict], error: Exception | None) -> None:
    """Raise what `agree` says, if there is a verdict on any rank.

    Args:
        verdicts: of all ranks.
        error: this rank's own.
    """
    failed = {index: verdict for index, verdict in enumerate(verdicts) if verdict is not None}
    if not failed:
        return
    error_class = failed[min(failed)][0]
    ranks_by_message: dict[str, list[int]] = {}
    for index, (_, message) in failed.items():
        ranks_by_message.setdefault(message, []).append(index)
    if len(failed) == len(verdicts) and len(ranks_by_message) == 1:
        if isinstance(error, error_class):
            raise error
        raise error_class(next(iter(ranks_by_message))) from error
    lines = [f"{_rank_list(indices, len(verdicts))}: {message}" for message, indices in ranks_by_message.items()]
    raise error_class("\n".join(lines)) from error


def _rank_list(indices: list[int], count: int) -> str:
    return f"{'rank' if len(indices) == 1 else 'ranks'} {', '.join(map(str, indices))} of {count}"
