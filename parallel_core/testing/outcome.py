"""What became of a call on each rank, and how a failed call is told."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

_SHOWN_OUTPUT = 4000  # characters of a rank's output in a report: enough for a traceback, not for a training log


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What became of a call on one rank.

    Attributes:
        rank: the rank.
        status: ``"returned"``, ``"raised"``, ``"died"`` (the process ended) or ``"hung"`` (it was still running at the
            time limit, or a few seconds after another rank had failed, and was stopped).
        value: what the function returned.
        exception: what it raised, without its traceback; None where the exception can't be pickled.
        error_type: the qualified name of the exception's class (``"ValueError"``, ``"torch.OutOfMemoryError"``).
        message: the exception's message; how the process ended; or where it hung.
        traceback: the traceback's text, causes included; or the stacks of all threads of a rank that hung.
        output: what the rank wrote to stdout and stderr during the call, in the order written.
        leftovers: what the function left behind on this rank, a line each.
    """

    rank: int
    status: Literal["returned", "raised", "died", "hung"]
    value: Any = None
    exception: BaseException | None = None
    error_type: str = ""
    message: str = ""
    traceback: str = ""
    output: str = ""
    leftovers: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the function returned and left nothing behind."""
        return self.status == "returned" and not self.leftovers

    def headline(self) -> str:
        """Say in one line what became of the call on this rank."""
        match self.status:
            case "returned" if self.leftovers:
                return f"left behind: {'; '.join(self.leftovers)}"
            case "returned":
                return f"returned {' '.join(reprlib.repr(self.value).split())}"
            case "raised":
                first, *more = self.message.splitlines() or [""]
                message = f": {first}{' ...' if more else ''}" if first else ""
                left = f"; left behind: {'; '.join(self.leftovers)}" if self.leftovers else ""
                return f"raised {self.error_type}{message}{left}"
            case "died":
                return f"died: {self.message}"
            case "hung":
                return f"hung {self.message}"

    def details(self) -> str:
        """Return the traceback or stacks and the tail of the output, empty where there is nothing to tell."""
        parts = []
        if self.traceback:
            parts.append(self.traceback.rstrip())
        if self.output.strip():
            tail = self.output[-_SHOWN_OUTPUT:].rstrip()
            parts.append(f"output{' (its end)' if len(self.output) > _SHOWN_OUTPUT else ''}:\n{_indented(tail)}")
        return "\n".join(parts)


class RanksFailed(AssertionError):  # noqa: N818 - like pytest's own Failed: the verdict on a test
    """A function run on ranks did not return on every rank, or left something behind.

    The message tells for every rank what became of it, with its traceback or the place where it hung, and the tail of
    its output.

    Attributes:
        outcomes: one :class:`Outcome` a rank, by rank.
    """

    def __init__(self, name: str, outcomes: Sequence[Outcome]) -> None:
        self.name = name
        self.outcomes = list(outcomes)
        super().__init__(name, self.outcomes)

    def __str__(self) -> str:
        failed = [outcome.rank for outcome in self.outcomes if not outcome.ok]
        lines = [f"{self.name} failed on {_ranks(failed)} of {len(self.outcomes)}"]
        lines += [f"  rank {outcome.rank} {outcome.headline()}" for outcome in self.outcomes]
        # Ranks mostly fail alike: what is the same on several is told once.
        told: dict[str, list[int]] = {}
        for outcome in self.outcomes:
            if details := outcome.details():
                told.setdefault(details, []).append(outcome.rank)
        for details, ranks in told.items():
            lines += ["", f"{_ranks(ranks)}:", _indented(details)]
        return "\n".join(lines)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.splitlines())
