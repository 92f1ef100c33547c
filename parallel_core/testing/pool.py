"""The pool: runs a task on the first N workers and says what became of it on each rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

from parallel_core.testing.outcome import Outcome
from parallel_core.testing.protocol import Answer, Died, Returned, Settle, Settled
from parallel_core.testing.task import Task
from parallel_core.testing.template_process import Templates
from parallel_core.testing.verdict import hung, outcome_of
from parallel_core.testing.worker_process import WorkerProcess

GRACE = 5.0
"""Seconds that the other ranks get once one has failed: they may be on their way to the same error."""

_SETTLE_LIMIT = 10.0  # seconds to destroy a process group and look for leftovers


class Pool:
    """Worker processes, started when first needed and reused from task to task."""

    def __init__(self) -> None:
        self._templates = Templates()
        self._workers: dict[int, WorkerProcess] = {}  # by rank

    def run(self, task: Task) -> list[Outcome]:
        """Run a task and return one outcome a rank, by rank.

        Raises:
            RuntimeError: a worker could not be started.
        """
        workers = self._ready_workers(task.world_size)
        try:
            with task.calls() as calls:
                for worker, call in zip(workers, calls, strict=True):
                    worker.clear()
                    worker.send(call)
                answers = _answers(workers, task.timeout)
                if len(answers) == len(workers) and not any(isinstance(answer, Died) for answer in answers.values()):
                    outcomes, spoilt = _settled(workers, answers)
                else:
                    outcomes, spoilt = _broken(workers, answers, task.timeout), workers
        except BaseException:
            # Ctrl-C, or a time limit that the test set itself: nobody knows what these workers are doing.
            self._discard(workers)
            raise
        self._discard(spoilt)
        return outcomes

    def close(self) -> None:
        """End every worker."""
        for worker in self._workers.values():
            worker.ask_to_leave()
        for worker in self._workers.values():
            worker.wait_gone()
        self._workers.clear()
        self._templates.close()

    def _ready_workers(self, count: int) -> list[WorkerProcess]:
        self._discard([worker for worker in self._workers.values() if not worker.alive()])
        for rank in range(count):
            if rank not in self._workers:
                self._workers[rank] = WorkerProcess(self._templates, rank)
        workers = [self._workers[rank] for rank in range(count)]
        try:
            for worker in workers:
                worker.wait_ready()
        except BaseException:
            self._discard(workers)
            raise
        return workers

    def _discard(self, workers: list[WorkerProcess]) -> None:
        self._workers = {rank: worker for rank, worker in self._workers.items() if worker not in workers}
        for worker in workers:
            worker.kill()


def _answers(workers: list[WorkerProcess], timeout: float) -> dict[int, Answer]:
    """Return the answers of the ranks that give one in time."""
    answers: dict[int, Answer] = {}
    limit = _Limit(timeout)
    for rank, answer in _messages(workers, limit):
        answers[rank] = answer
        if not isinstance(answer, Returned):
            limit.shorten(GRACE)
    return answers


def _settled(workers: list[WorkerProcess], answers: dict[int, Answer]) -> tuple[list[Outcome], list[WorkerProcess]]:
    """Return the outcomes, where every rank has answered, and the workers that can't be used again."""
    outcomes = [outcome_of(worker, rank, answers[rank]) for rank, worker in enumerate(workers)]
    for worker in workers:
        worker.send(Settle())
    settled = dict(_messages(workers, _Limit(_SETTLE_LIMIT)))
    # A collective that a rank never joined keeps the group from being destroyed. After an error that is to be expected;
    # where every rank returned it is a fault of the function.
    returned = all(outcome.status == "returned" for outcome in outcomes)
    pending = f"a collective that is still pending: the process group could not be destroyed in {_SETTLE_LIMIT:g} s"
    left: list[tuple[str, ...]] = []
    for rank, worker in enumerate(workers):
        match settled.get(rank):
            case Settled(leftovers):
                left.append(leftovers)
            case Died():
                left.append((f"a process that did not survive the end of the call: {worker.exit_text()}",))
            case _:
                left.append((pending,) if returned else ())
    spoilt = [worker for rank, worker in enumerate(workers) if left[rank] or rank not in settled]
    return [replace(outcome, leftovers=lines) for outcome, lines in zip(outcomes, left, strict=True)], spoilt


def _broken(workers: list[WorkerProcess], answers: dict[int, Answer], timeout: float) -> list[Outcome]:
    """Return the outcomes where ranks hang or have died."""
    # Every rank that hangs is looked at before one is stopped: the end of one would wake the others.
    stacks = {rank: worker.stacks() for rank, worker in enumerate(workers) if rank not in answers}
    failed = next((rank for rank, answer in answers.items() if not isinstance(answer, Returned)), None)
    when = f"{timeout:g} s after the start" if failed is None else f"{GRACE:g} s after rank {failed} had failed"
    return [
        outcome_of(worker, rank, answers[rank]) if rank in answers else hung(worker, rank, stacks[rank], when)
        for rank, worker in enumerate(workers)
    ]


class _Limit:
    """A moment that can be brought forward while it is waited for."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def shorten(self, seconds: float) -> None:
        """Let no more than this many seconds be left."""
        self._end = min(self._end, time.monotonic() + seconds)

    def left(self) -> float:
        """Return the seconds left, never less than 0."""
        return max(0.0, self._end - time.monotonic())


def _messages(workers: list[WorkerProcess], limit: _Limit) -> Iterator[tuple[int, Any]]:
    """Yield (rank, message), one a rank, as they come, until the limit."""
    waiting = dict(enumerate(workers))
    while waiting and (left := limit.left()):
        # A child process of a dead worker's may hold its end of the channel open: the process itself is looked at too.
        gone = {rank for rank, worker in waiting.items() if not worker.alive()}
        ready = wait([worker.connection for worker in waiting.values()], 0 if gone else min(left, 0.2))
        for rank, worker in list(waiting.items()):
            if worker.connection in ready:
                yield rank, waiting.pop(rank).receive()
            elif rank in gone:
                del waiting[rank]
                yield rank, Died()
