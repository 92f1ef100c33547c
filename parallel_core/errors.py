"""Every error that parallel_core raises on purpose; one base class catches them all."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ParallelCoreError",
    "ProcessGroupError",
    "RankError",
    "StateDictError",
    "StrategyError",
    "TrainingError",
    "WrapError",
    "did_you_mean",
]


class ParallelCoreError(Exception):
    """The base of all errors of this package.

    An error is built from one message, so that it can be sent to another rank and raised there as the same error.
    """


class ConfigError(ParallelCoreError):
    """The configuration is not valid; `problems` lists everything that is wrong with it, a line each."""

    def __init__(self, problems: str | tuple[str, ...] | list[str]) -> None:
        self.problems: tuple[str, ...] = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__(self.problems)

    def __str__(self) -> str:
        if len(self.problems) == 1:
            return self.problems[0]
        return "\n  - ".join([f"{len(self.problems)} problems in the configuration:", *self.problems])


class StrategyError(ParallelCoreError):
    """A strategy is unknown, can't be loaded, or breaks the contract of the hooks."""


class WrapError(ParallelCoreError):
    """A model or an optimizer can't be wrapped as the configuration asks; nothing has been changed."""


class TrainingError(ParallelCoreError):
    """A training step would go wrong without a word, so it is not made; the parameters are as they were."""


class StateDictError(ParallelCoreError):
    """A state dict does not fit the model or the optimizer; nothing has been loaded."""


class CheckpointError(ParallelCoreError):
    """A checkpoint can't be saved, is not whole, or does not fit; the same error on every rank."""


class ProcessGroupError(ParallelCoreError):
    """The ranks can't be brought together, or can't talk to each other as asked."""


class RankError(ParallelCoreError):
    """Something failed on one rank that is not an error of this package; raised on every rank, naming that rank."""


def did_you_mean(found: str, allowed: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the allowed name nearest to the one found, or nothing where none is near.

    Capital letters count where a name that is near has them as well.
    """
    names = list(allowed)
    nearest = difflib.get_close_matches(found, names, n=1) or difflib.get_close_matches(found.lower(), names, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""
