"""Turns what came, or did not come, from a worker into the outcome of its rank."""

from __future__ import annotations

from parallel_core.testing.outcome import Outcome
from parallel_core.testing.payload import unpacked
from parallel_core.testing.protocol import Answer, Died, Raised, Returned
from parallel_core.testing.stacks import place, shortened
from parallel_core.testing.worker_process import WorkerProcess


def outcome_of(worker: WorkerProcess, rank: int, answer: Answer) -> Outcome:
    """Return the outcome of a rank that has answered or died."""
    output = worker.output()
    match answer:
        case Died():
            stacks = worker.written_stacks()
            message = worker.exit_text() + (f" {place(stacks)}" if stacks else "")
            return Outcome(rank=rank, status="died", message=message, traceback=shortened(stacks), output=output)
        case Raised():
            return Outcome(
                rank=rank,
                status="raised",
                exception=_exception(answer.exception),
                error_type=answer.error_type,
                message=answer.message,
                traceback=answer.traceback,
                output=output,
            )
        case Returned(data):
            try:
                return Outcome(rank=rank, status="returned", value=unpacked(data), output=output)
            except Exception as error:  # whatever the value's own way of being unpickled raises
                kind = type(error).__name__
                message = (
                    f"the result can't be unpickled in the test's process: {error}; return plain values and tensors"
                )
                return Outcome(
                    rank=rank, status="raised", exception=error, error_type=kind, message=message, output=output
                )


def _exception(data: bytes | None) -> BaseException | None:
    try:
        value = None if data is None else unpacked(data)
    except Exception:  # a class that this process does not have
        return None
    return value if isinstance(value, BaseException) else None


def hung(worker: WorkerProcess, rank: int, stacks: str, when: str) -> Outcome:
    """Return the outcome of a rank that still ran when the pool's patience was at its end."""
    return Outcome(
        rank=rank,
        status="hung",
        message=f"{place(stacks)}, {when}",
        traceback=shortened(stacks),
        output=worker.output(),
    )
