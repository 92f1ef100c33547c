"""Clauses on the optimizer: which is accepted, and its state."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import parallel_core
from parallel_core import StateDictError, WrapError
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.declaration import Capability, Declaration
from parallel_core.testing.conformance.runs import (
    KINDS,
    MakeOptimizer,
    Run,
    adamw,
    differences,
    for_each,
    momentum,
    problems,
    sgd,
)
from parallel_core.testing.models import CASES


class OptimizerClauses(Declaration):
    """What `wrap_optimizer` accepts, and what is saved and loaded of it."""

    def test_refuses_an_optimizer_from_before_the_wrap(self, ranks: Ranks) -> None:
        """An optimizer made before the wrap is a WrapError: it may train nothing."""
        config = self.config("blocks")

        def work() -> str:
            model = CASES["blocks"].build()
            optimizer = adamw(model.parameters())
            wrapped = parallel_core.wrap_model_for_training(model, config)
            assert wrapped is not None
            try:
                parallel_core.wrap_optimizer(wrapped, optimizer)
            except WrapError as error:
                return str(error)
            return "no error"

        assert all("before the model was wrapped" in message for message in ranks(work))

    @pytest.mark.parametrize("make", [adamw, momentum, sgd])
    def test_optimizer_state_comes_back(self, ranks: Ranks, make: MakeOptimizer) -> None:
        """Saved and loaded into a fresh optimizer, state and options are the same bits."""

        def work(case: str, config: Any) -> list[str]:
            run = Run(case, config, make_optimizer=make)
            run.train(range(2))
            assert run.optimizer is not None
            expected, found = parallel_core.optimizer_state_dict(run.model, run.optimizer), []
            for kind in KINDS:
                saved = parallel_core.optimizer_state_dict(run.model, run.optimizer, kind)
                fresh = parallel_core.wrap_optimizer(run.model, make(run.model.parameters()))
                fresh.param_groups[0]["lr"] = 7.0
                parallel_core.load_optimizer_state_dict(run.model, fresh, saved, kind)
                found += differences(parallel_core.optimizer_state_dict(run.model, fresh), expected, where=kind)
            return found

        assert problems(ranks(for_each, self.cases(training=True, telling=True), work)) == []

    def test_optimizer_state_is_the_bare_models(self, ranks: Ranks) -> None:
        """`full` has the names, shapes and values of one process's state, on rank 0; elsewhere it is empty."""
        self.needs(Capability.SAME_LOSSES)
        cases = self.cases(exact=True)

        def work(case: str, config: Any) -> dict[str, Any]:
            run = Run(case, config)
            run.train(range(3))
            assert run.optimizer is not None
            return parallel_core.optimizer_state_dict(run.model, run.optimizer)

        (expected,) = ranks(for_each, dict.fromkeys(cases), work, world_size=1, process_group=False)
        found, elsewhere = ranks(for_each, cases, work)
        assert differences(found, expected, tolerance=1e-5) == []
        assert elsewhere == {case: {} for case in cases}

    def test_reading_state_before_the_first_step_changes_nothing(self, ranks: Ranks) -> None:
        """An optimizer that has not stepped, or has gradients waiting, trains on as if nobody had looked."""
        config = self.config("blocks")

        def trained(kinds: tuple[str, ...]) -> dict[str, Any]:
            run = Run("blocks", config)
            assert run.optimizer is not None
            for kind in kinds:
                parallel_core.optimizer_state_dict(run.model, run.optimizer, kind)
            run.backward(seed=0)
            for kind in kinds:
                parallel_core.optimizer_state_dict(run.model, run.optimizer, kind)
                parallel_core.model_state_dict(run.model, kind)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.step(1)
            return run.full()

        def work() -> list[str]:
            return differences(trained(KINDS), trained(()))

        assert ranks(work) == [[], []]

    def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(self, ranks: Ranks) -> None:
        """State loaded into a new model and a new optimizer gives the same next steps, bit for bit."""

        def work(case: str, config: Any) -> list[str]:
            run, resumed, found = Run(case, config), {}, []
            run.train(range(2))
            assert run.optimizer is not None
            for kind in KINDS:
                weights = parallel_core.model_state_dict(run.model, kind)
                state = parallel_core.optimizer_state_dict(run.model, run.optimizer, kind)
                other = resumed[kind] = Run(case, config, seed=9)
                assert other.optimizer is not None
                parallel_core.load_model_state_dict(other.model, weights, kind)
                parallel_core.load_optimizer_state_dict(other.model, other.optimizer, state, kind)
            if case == "batch_norm":
                del resumed["full"]  # each rank has statistics of its own, and a full dict holds rank 0's
            losses = {"losses": [run.step(seed) for seed in (5, 6)]}
            weights = run.full()
            for kind, other in resumed.items():
                found += differences({"losses": [other.step(seed) for seed in (5, 6)]}, losses, where=kind)
                found += differences(other.full(), weights, where=kind)
            return found

        assert problems(ranks(for_each, self.cases(training=True, telling=True), work)) == []

    def test_a_run_that_resumes_after_every_step_goes_on_all_the_same(self, ranks: Ranks) -> None:
        """State that is read and loaded after every step changes nothing: no rank's part of it falls behind."""
        config = self.config("language_model")

        def work() -> dict[str, list[float]]:
            losses: dict[str, list[float]] = {}
            for kind in ("", *KINDS):
                run = Run("language_model", config)
                assert run.optimizer is not None
                losses[kind] = []
                for seed in range(4):
                    losses[kind].append(run.step(seed))
                    if kind:
                        state = parallel_core.optimizer_state_dict(run.model, run.optimizer, kind)
                        parallel_core.load_optimizer_state_dict(run.model, run.optimizer, state, kind)
            return losses

        for losses in ranks(work):
            straight = losses.pop("")
            for kind, resumed in losses.items():
                assert resumed == pytest.approx(straight, abs=1e-6), kind

    def test_optimizer_state_moves_to_one_process_and_back(self, ranks: Ranks) -> None:
        """`full` optimizer state of one process loads on any number of ranks, and comes out as the same bits."""
        config = self.config("blocks")

        def save() -> dict[str, Any]:
            run = Run("blocks", None)
            run.train(range(2))
            assert run.optimizer is not None
            return parallel_core.optimizer_state_dict(run.model, run.optimizer)

        def move(config: Any, given: dict[str, Any]) -> dict[str, Any]:
            run = Run("blocks", config)
            assert run.optimizer is not None
            own = given if collective.rank() == 0 else None
            parallel_core.load_optimizer_state_dict(run.model, run.optimizer, own)
            return parallel_core.optimizer_state_dict(run.model, run.optimizer)

        (saved,) = ranks(save, world_size=1, process_group=False)
        for world_size in self.world_sizes:
            found = ranks(move, config, saved, world_size=world_size)[0]
            assert differences(found, saved) == []
            (back,) = ranks(move, None, found, world_size=1, process_group=False)
            assert differences(back, saved) == []

    @pytest.mark.parametrize("kind", KINDS)
    def test_optimizer_state_that_does_not_fit_is_refused(self, ranks: Ranks, kind: str) -> None:
        """State of an unknown parameter is one StateDictError on every rank, and nothing is loaded."""
        config = self.config("blocks")

        def work() -> list[Any]:
            run = Run("blocks", config)
            run.train(range(1))
            assert run.optimizer is not None
            saved = parallel_core.optimizer_state_dict(run.model, run.optimizer, kind)
            before = parallel_core.optimizer_state_dict(run.model, run.optimizer)
            if collective.rank() == 0:
                saved["state"]["ghost"] = {"exp_avg": torch.ones(2)}
            try:
                parallel_core.load_optimizer_state_dict(run.model, run.optimizer, saved, kind)
            except StateDictError as error:
                after = parallel_core.optimizer_state_dict(run.model, run.optimizer)
                return [str(error), differences(after, before)]
            return ["no error", []]

        first, second = ranks(work, timeout=30)
        assert first == second
        assert "'ghost'" in first[0]
        assert first[1] == []
