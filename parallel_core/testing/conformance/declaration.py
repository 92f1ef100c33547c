"""What the author of a strategy declares about it, once; the clauses ask for it and never for a strategy's name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, ClassVar

import pytest

from parallel_core import DistributedConfig
from parallel_core.testing.conformance.declaration_checks import declaration_problems
from parallel_core.testing.models import CASES

#: Cases whose state lies in different ways: in units, tied, smaller than the ranks are many, frozen, in buffers.
TELLING = ("blocks", "language_model", "small_parameters", "adapter", "batch_norm")


class Capability(StrEnum):
    """What a strategy may lack, if it says so."""

    SAME_LOSSES = "the losses of one process"
    SHARDING = "a share of the parameters on each rank"
    QUIET_ACCUMULATION = "no communication of gradients under no_sync"
    UNUSED_PARAMETERS = "no gradient, and no step, for a parameter that the loss does not use"
    COMPILE = "torch.compile"
    DECLINING = "nothing to do for a single process"


class Declaration:
    """The attributes that a conformance class sets.

    Attributes:
        strategy: the strategy's name.
        options: its settings for the clauses, without the strategy's prefix: full precision, and units small enough for
            models of a hundred parameters.
        options_for: further settings for some cases of `parallel_core.testing.models`, by the case's name.
        world_sizes: the numbers of ranks to run on, each at least 2.
        models: the cases to try, by name, where all of them would take too long; what is left out is not shown.
        lacks: the capabilities that the strategy does not have, each with the reason. A clause that needs one of them
            is skipped and says so; a gap that is not declared here is a failure.
        refuses: the cases that the strategy refuses to wrap, each with a regular expression that the `WrapError` must
            match. Every other case must work.
    """

    strategy: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}
    options_for: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    world_sizes: ClassVar[tuple[int, ...]] = (2,)
    models: ClassVar[Collection[str]] = tuple(CASES)
    lacks: ClassVar[Mapping[Capability, str]] = {}
    refuses: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        attributes = {name: getattr(cls, name) for name in Declaration.__annotations__ if hasattr(cls, name)}
        problems = list(declaration_problems(vars(cls), attributes, Capability))
        if problems:
            raise TypeError("\n  - ".join([f"{cls.__name__} declares what can't be:", *problems]))

    @classmethod
    def config(cls, case: str | None = None, **settings: Any) -> DistributedConfig:
        """Return the config under which the clauses run the strategy; `settings` are the core's own."""
        options = {**cls.options, **cls.options_for.get(case or "", {})}
        prefixed = {f"{cls.strategy}_{name}": value for name, value in options.items()}
        return DistributedConfig(parallel_strategy=cls.strategy, **prefixed, **settings)

    @classmethod
    def needs(cls, capability: Capability) -> None:
        """Skip the clause where the strategy declares that it lacks the capability."""
        if capability in cls.lacks:
            pytest.skip(f"{cls.strategy} declares that it lacks {capability}: {cls.lacks[capability]}")

    @classmethod
    def cases_on(cls, world_size: int, *, exact: bool = False) -> dict[str, DistributedConfig]:
        """Return the cases to run on a number of ranks: all on the first that is declared, a few on the others."""
        return cls.cases(exact=exact, telling=world_size != cls.world_sizes[0])

    @classmethod
    def cases(
        cls, *, training: bool = False, exact: bool = False, telling: bool = False
    ) -> dict[str, DistributedConfig]:
        """Return the cases that the strategy wraps, each with its config.

        Args:
            training: only those with something to train.
            exact: only those whose losses must be those of one process.
            telling: only a few, whose state lies in different ways, for what is shown for all of them elsewhere; all
                where none of these is left.
        """
        found = [case for name, case in CASES.items() if name in cls.models and name not in cls.refuses]
        if telling:
            found = [case for case in found if case.name in TELLING] or found
        if training or exact:
            found = [case for case in found if case.trains]
        if exact:
            found = [case for case in found if case.exact]
            if Capability.UNUSED_PARAMETERS in cls.lacks:
                found = [case for case in found if not case.unused]
        return {case.name: cls.config(case.name) for case in found}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give a clause the refusals and numbers of ranks that the class declares.

        Raises:
            CollectError: the class is a suite, and names no strategy.
        """
        if not hasattr(metafunc.cls, "strategy"):
            raise pytest.Collector.CollectError(
                f"{metafunc.cls.__name__} names no strategy; set `strategy` to its name, or `__test__ = False` where "
                f"other classes inherit from this one"
            )
        for name, declared in {"refused": metafunc.cls.refuses, "world_size": metafunc.cls.world_sizes}.items():
            if name in metafunc.fixturenames:
                metafunc.parametrize(name, list(declared))


def matches(pattern: str, text: str) -> bool:
    """Return whether a regular expression matches anywhere in a text."""
    return re.search(pattern, text) is not None
