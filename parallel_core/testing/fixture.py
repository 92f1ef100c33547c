"""The fixture's object: what a test calls."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType, TracebackType
from typing import Any, Self

from parallel_core.testing.outcome import Outcome, RanksFailed
from parallel_core.testing.payload import name_of, packed_function
from parallel_core.testing.pool import Pool
from parallel_core.testing.task import Task


class Ranks:
    """Runs functions on ranks, in worker processes that are started once and reused.

    A call ``ranks(function, *args, **kwargs)`` runs the function at the same time in ``world_size`` processes, and
    returns what they returned, by rank. The function may be nested, a closure or a lambda; it gets copies of what it
    refers to, and what it changes in them stays on the rank. What it returns is pickled; tensors come back on the CPU,
    without their graph.

    What holds on a rank:

    - ``torch.distributed`` is initialised over just these ranks and destroyed after the call. With
      ``process_group=False`` it is not, and the environment is that of a process which torchrun started, so that
      ``torch.distributed.init_process_group()`` works.
    - ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE`` and ``LOCAL_WORLD_SIZE`` are set. All else in the environment, the
      working directory, ``sys.path`` and the filters for warnings are those of the test at the moment of the call: a
      project whose tests turn warnings into errors has them so on the ranks, and ``pytest.mark.filterwarnings`` and
      ``monkeypatch`` reach them. All is restored after the call.
    - Python's, NumPy's and torch's generators of random numbers are seeded with 0, alike on every rank.
    - torch computes on one thread (``OMP_NUM_THREADS=1``).
    - What is printed goes to the test's own stdout after the call, and into the report of a failure.

    A function must leave no process group of its own, no child process or thread, and no global state of torch's
    changed (default dtype and device, grad mode, ...): the call fails, saying what was left.

    Not available on Windows.
    """

    def __init__(
        self,
        *,
        by_value: Callable[[], Iterable[ModuleType]] = tuple,
        measured: Callable[[int], Collection[int]] = range,
    ) -> None:
        """Prepare a pool; no process is started before the first call.

        Args:
            by_value: gives the modules that workers can't import by name; their functions and classes are sent whole.
            measured: tells, of a number of ranks, which of them measure coverage in a call while this process does.
        """
        self._pool = Pool()
        self._by_value = by_value
        self._measured = measured

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every worker."""
        self._pool.close()

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        timeout: float = 60.0,
        backend: str = "gloo",
        process_group: bool = True,
        env: Mapping[str, str | None] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run ``function(*args, **kwargs)`` on ranks and return the results by rank.

        Args:
            function: what to run; arguments of its own that are named like one of the following need a lambda.
            world_size: how many ranks.
            timeout: seconds after which ranks that still run are stopped; starting the workers does not count. Once a
                rank has failed, the others get 5 more seconds.
            backend: of the process group; with ``"nccl"`` in it, rank i uses GPU i.
            process_group: whether to initialise ``torch.distributed``.
            env: changes to the environment; None removes a variable.

        Raises:
            RanksFailed: the function raised, hung or died on a rank, or left something behind.
            TypeError: the function or an argument can't be pickled.
        """
        __tracebackhide__ = True
        outcomes = self._run(
            function,
            *args,
            world_size=world_size,
            timeout=timeout,
            backend=backend,
            process_group=process_group,
            env=env,
            **kwargs,
        )
        if not all(outcome.ok for outcome in outcomes):
            raise RanksFailed(name_of(function), outcomes)
        _show_output(outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int = 2,
        timeout: float = 60.0,
        backend: str = "gloo",
        process_group: bool = True,
        env: Mapping[str, str | None] | None = None,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Run a function as a call does, and return what became of it on each rank instead of raising.

        Takes the arguments of a call. For tests of failure::

            outcomes = ranks.outcomes(work)
            assert {outcome.error_type for outcome in outcomes} == {"ValueError"}

        Raises:
            RanksFailed: the function left something behind on a rank, which is never what a test means.
            TypeError: the function or an argument can't be pickled.
        """
        __tracebackhide__ = True
        outcomes = self._run(
            function,
            *args,
            world_size=world_size,
            timeout=timeout,
            backend=backend,
            process_group=process_group,
            env=env,
            **kwargs,
        )
        if any(outcome.leftovers for outcome in outcomes):
            raise RanksFailed(name_of(function), outcomes)
        _show_output(outcomes)
        return outcomes

    def _run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world_size: int,
        timeout: float,
        backend: str,
        process_group: bool,
        env: Mapping[str, str | None] | None,
        **kwargs: Any,
    ) -> list[Outcome]:
        __tracebackhide__ = True
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}: it must be at least 1")
        if timeout <= 0:
            raise ValueError(f"timeout is {timeout}: it must be more than 0 seconds")
        return self._pool.run(
            Task(
                function=packed_function(function, args, kwargs, by_value=self._by_value()),
                world_size=world_size,
                timeout=timeout,
                backend=backend,
                process_group=process_group,
                env=env or {},
                filters=[tuple(entry) for entry in warnings.filters],
                measured=self._measured(world_size),
            )
        )


def _show_output(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if outcome.output:
            sys.stdout.write(f"-- output of rank {outcome.rank} --\n{outcome.output.rstrip()}\n")
