"""Clauses on the model's state dicts."""

from __future__ import annotations

from typing import Any

import torch

import parallel_core
from parallel_core import DistributedConfig
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.declaration import Declaration
from parallel_core.testing.conformance.runs import (
    KINDS,
    Run,
    cloned,
    copied,
    differences,
    for_each,
    problems,
    scramble,
    whole,
)
from parallel_core.testing.models import CASES


def trained(case: str, config: DistributedConfig | None) -> dict[str, Any]:
    """Return the full state dict after two steps."""
    run = Run(case, config, seed=3)
    run.train(range(2))
    return run.full()


class StateClauses(Declaration):
    """What is saved, and what loads."""

    def test_full_state_is_the_bare_models(self, ranks: Ranks) -> None:
        """`full` has the bare model's names, order, shapes and dtypes, on the CPU of rank 0; elsewhere it is empty."""

        def work(case: str, config: Any) -> list[str]:
            found = Run(case, config).full()
            tensors = {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
            elsewhere = [name for name in tensors if tensors[name].device.type != "cpu"]
            return [
                *(f"{name!r} is not on the CPU" for name in elsewhere),
                *(
                    f"{name!r} is a {type(tensors[name]).__name__}"
                    for name in tensors
                    if hasattr(tensors[name], "placements")
                ),
                *differences(found, CASES[case].build().state_dict() if collective.rank() == 0 else {}),
            ]

        assert problems(ranks(for_each, self.cases(), work)) == []

    def test_full_state_is_a_snapshot(self, ranks: Ranks) -> None:
        """Steps that follow don't change a `full` dict; its entries share memory with nothing, tied ones neither."""
        config = self.config("language_model")

        def work() -> list[Any]:
            run = Run("language_model", config)
            found = run.full()
            before = copied(found)
            run.train(range(2))
            pointers = [value.data_ptr() for value in found.values()]
            return [differences(found, before), len(pointers) - len(set(pointers))]

        assert ranks(work) == [[[], 0], [[], 0]]

    def test_sharded_state_is_on_every_rank(self, ranks: Ranks, world_size: int) -> None:
        """`sharded` has the bare model's names on every rank; gathered, it is what `full` has."""

        def work(case: str, config: Any) -> list[str]:
            run = Run(case, config)
            run.train(range(2))
            gathered, full = whole(parallel_core.model_state_dict(run.model, "sharded")), run.full()
            expected = full if collective.rank() == 0 else gathered
            wrong_names = (
                [] if list(gathered) == list(CASES[case].build().state_dict()) else [f"names: {list(gathered)}"]
            )
            return wrong_names + differences(gathered, expected)

        assert problems(ranks(for_each, self.cases_on(world_size), work, world_size=world_size)) == []

    def test_state_comes_back(self, ranks: Ranks) -> None:
        """Saved, overwritten and loaded, every value is the same bits on every rank; the dict is as it was given."""

        def work(case: str, config: Any) -> list[str]:
            run, lines = Run(case, config, seed=1), []
            run.train(range(2))
            before = run.local()
            # The full dict comes last: buffers may differ between ranks, and it has those of rank 0.
            for kind in reversed(KINDS):
                saved = cloned(parallel_core.model_state_dict(run.model, kind))
                given = dict(saved)
                scramble(run.model)
                answer = parallel_core.load_model_state_dict(run.model, saved, kind)
                lost = buffers(case) if kind == "full" and collective.rank() else set()
                expected = {name: value for name, value in before.items() if name not in lost}
                found = {name: value for name, value in run.local().items() if name not in lost}
                if answer != ([], []):
                    lines.append(f"{kind}: missing and unexpected are {answer}")
                if list(saved.items()) != list(given.items()):
                    lines.append(f"{kind}: the caller's dict was changed")
                lines += differences(found, expected, where=kind)
            return lines

        assert problems(ranks(for_each, self.cases(), work)) == []

    def test_loads_the_bare_models_state(self, ranks: Ranks, world_size: int) -> None:
        """A state dict of one process loads, from rank 0 alone, and comes out of `full` as the same bits."""
        cases = self.cases_on(world_size)
        (expected,) = ranks(for_each, dict.fromkeys(cases), trained, world_size=1, process_group=False)

        def work(case: str, config: Any) -> list[str]:
            run = Run(case, config)
            parallel_core.load_model_state_dict(run.model, expected[case] if collective.rank() == 0 else None)
            return differences(run.full(), expected[case] if collective.rank() == 0 else {})

        assert problems(ranks(for_each, cases, work, world_size=world_size)) == []

    def test_state_loads_into_the_bare_model(self, ranks: Ranks) -> None:
        """Both kinds of state load into the bare model on the same ranks, as the same bits."""

        def work(case: str, config: Any) -> list[str]:
            run = Run(case, config)
            run.train(range(2))
            expected, found = run.full(), []
            for kind in KINDS:
                bare = CASES[case].build(seed=5)
                parallel_core.load_model_state_dict(bare, parallel_core.model_state_dict(run.model, kind), kind)
                if collective.rank() == 0:
                    found += differences(bare.state_dict(), expected, where=kind)
            return found

        assert problems(ranks(for_each, self.cases(telling=True), work)) == []

    def test_state_moves_to_another_number_of_ranks(self, ranks: Ranks) -> None:
        """A `full` dict saved by some ranks loads on more and on fewer, as the same bits."""
        few, many = min(self.world_sizes), max(*self.world_sizes, 3)

        def move(case: str, config: Any) -> list[str]:
            run = Run(case, config, seed=5)
            given = saved[case] if collective.rank() == 0 else {}
            parallel_core.load_model_state_dict(run.model, given)
            return differences(run.full(), given)

        for start, end in ((few, many), (many, few)):
            saved = ranks(for_each, self.cases(telling=True), trained, world_size=start)[0]
            assert problems(ranks(for_each, self.cases(telling=True), move, world_size=end)) == []

    def test_keeps_the_dtype_it_was_given(self, ranks: Ranks) -> None:
        """A model in bf16 is saved in bf16, after training too; one of another dtype loads if cast=True."""
        config = self.config("blocks")

        def work() -> list[Any]:
            model = CASES["blocks"].build().to(torch.bfloat16)
            wrapped = parallel_core.wrap_model_for_training(model, config)
            assert wrapped is not None
            inputs, targets = CASES["blocks"].batch(seed=1)
            CASES["blocks"].loss(wrapped(inputs.to(torch.bfloat16)), targets).backward()
            found = parallel_core.model_state_dict(wrapped)
            wide = {name: value.float() for name, value in found.items()}
            parallel_core.load_model_state_dict(wrapped, wide, cast=True)
            return [
                {value.dtype for value in found.values()},
                differences(parallel_core.model_state_dict(wrapped), found),
            ]

        first, second = ranks(work)
        assert first == [{torch.bfloat16}, []]
        assert second == [set(), []]

    def test_tied_parameters_stay_tied(self, ranks: Ranks) -> None:
        """After loading and a step, the names of a tied parameter still have one value."""
        config = self.config("language_model")

        def work() -> list[str]:
            run = Run("language_model", config)
            parallel_core.load_model_state_dict(run.model, CASES["language_model"].build(seed=4).state_dict())
            run.step(0)
            found = run.full()
            if not found:
                return []
            return differences({"weight": found["head.weight"]}, {"weight": found["embedding.weight"]})

        assert ranks(work) == [[], []]

    def test_loads_right_after_an_evaluation(self, ranks: Ranks) -> None:
        """State is read and loaded right after a forward, whether or not it kept a graph, and training goes on."""

        def work(case: str, config: Any) -> list[str]:
            run = Run(case, config)
            run.step(0)
            expected, found = run.full(), []
            inputs, _ = run.case.batch(seed=1)
            run.model.eval()
            for enabled in (True, False):
                with torch.set_grad_enabled(enabled):
                    run.model(inputs)
                found += differences(run.full(), expected)
                parallel_core.load_model_state_dict(run.model, expected)
                found += differences(run.full(), expected)
            run.model.train()
            run.step(1)
            return found

        assert problems(ranks(for_each, self.cases(training=True, telling=True), work)) == []


def buffers(case: str) -> set[str]:
    """Return the names of a case's buffers."""
    return {name for name, _ in CASES[case].build().named_buffers()}
