"""Clauses on the training step: losses, gradients, clipping, accumulation, scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import parallel_core
from parallel_core import DistributedConfig
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.declaration import Capability, Declaration
from parallel_core.testing.conformance.runs import Run, differences, for_each, problems, sgd

STEPS = 10


def trained(case: str, config: DistributedConfig | None) -> tuple[list[float], dict[str, Any]]:
    """Return the losses of ten steps, and the weights after them."""
    run = Run(case, config, seed=collective.rank())
    return run.train(range(STEPS)), run.full()


class TrainingClauses(Declaration):
    """What a step does."""

    def test_trains_as_one_process_does(self, ranks: Ranks, world_size: int) -> None:
        """Ten steps of AdamW give one process's losses and weights on the same batches, within 1e-5."""
        self.needs(Capability.SAME_LOSSES)
        cases = self.cases_on(world_size, exact=True)
        (expected,) = ranks(for_each, dict.fromkeys(cases), trained, world_size=1, process_group=False)
        found = ranks(for_each, cases, trained, world_size=world_size)
        for case, (losses, weights) in expected.items():
            for by_case in found:
                assert by_case[case][0] == pytest.approx(losses, abs=1e-5), case
            assert differences(found[0][case][1], weights, tolerance=1e-5, where=case) == []

    def test_leaves_unused_parameters_alone(self, ranks: Ranks) -> None:
        """A parameter that the loss does not use gets no gradient, and no weight decay either, as in one process."""
        self.needs(Capability.UNUSED_PARAMETERS)
        config = self.config("unused_parameter")

        def work() -> list[str]:
            run = Run("unused_parameter", config)
            before = run.full()
            run.train(range(2))
            after = run.full()
            spare = [name for name in before if name.startswith("spare.")]
            return differences({name: after[name] for name in spare}, {name: before[name] for name in spare})

        assert ranks(work) == [[], []]

    def test_ranks_stay_together(self, ranks: Ranks) -> None:
        """After training, what every rank holds whole is the same on all of them."""
        self.needs(Capability.SAME_LOSSES)

        def work(case: str, config: Any) -> list[str]:
            run = Run(case, config, seed=collective.rank())
            run.train(range(4))
            return collective.differing_tensors(held_whole(run))

        assert problems(ranks(for_each, self.cases(training=True, telling=True), work)) == []

    def test_clips_by_the_norm_of_the_whole_model(self, ranks: Ranks, world_size: int) -> None:
        """The norm is that of one process over the whole model, the same plain tensor on every rank, and it is kept."""
        config = self.config("blocks")
        norm_types = (2.0, 1.0, float("inf"))

        def reference(norm_type: float) -> float:
            run = Run("blocks", None)
            run.backward(seed=1)
            return nn.utils.clip_grad_norm_(run.model.parameters(), 0.1, norm_type).item()

        def work(norm_type: float) -> list[Any]:
            run = Run("blocks", config)
            run.backward(seed=1)
            norm = parallel_core.clip_grad_norm(run.model, 0.1, norm_type)
            after = parallel_core.clip_grad_norm(run.model, 0.1, norm_type)
            return [type(norm) is torch.Tensor and norm.dim() == 0, norm.item(), after.item()]

        self.needs(Capability.SAME_LOSSES)
        (expected,) = ranks(lambda: list(map(reference, norm_types)), world_size=1, process_group=False)
        for found in ranks(lambda: list(map(work, norm_types)), world_size=world_size):
            assert [is_plain for is_plain, _, _ in found] == [True] * 3
            assert [norm for _, norm, _ in found] == pytest.approx(expected, abs=1e-5)
            assert [after for _, _, after in found] == pytest.approx([0.1] * 3, abs=1e-4)

    def test_accumulates_the_gradient_of_the_whole_batch(self, ranks: Ranks, world_size: int) -> None:
        """Micro-batches under no_sync, and one outside, make the step of their sum, without what was zeroed before."""
        self.needs(Capability.SAME_LOSSES)
        config = self.config("blocks")

        def reference() -> dict[str, Any]:
            run = Run("blocks", None, make_optimizer=sgd)
            accumulate(run)
            return run.full()

        def work() -> dict[str, Any]:
            run = Run("blocks", config, make_optimizer=sgd)
            assert run.optimizer is not None
            for owner, set_to_none in ((run.model, True), (run.optimizer, True), (run.model, False)):
                with parallel_core.no_sync(run.model):
                    run.backward(seed=9)
                owner.zero_grad(set_to_none)
            accumulate(run)
            return run.full()

        (expected,) = ranks(reference, world_size=1, process_group=False)
        assert differences(ranks(work, world_size=world_size)[0], expected, tolerance=1e-6) == []

    def test_accumulates_in_silence(self, ranks: Ranks) -> None:
        """Under no_sync a backward pass reduces no gradients between ranks."""
        self.needs(Capability.QUIET_ACCUMULATION)
        config = self.config("blocks")

        def work() -> list[list[str]]:
            run = Run("blocks", config)
            run.step(0)
            with parallel_core.no_sync(run.model):
                silent = reductions(run)
            return [silent, reductions(run)]

        advice = "declare it: lacks = {Capability.QUIET_ACCUMULATION: reason}"
        for silent, loud in ranks(work):
            assert silent == [], f"a backward pass under no_sync reduces between ranks; if it has to, {advice}"
            assert loud, f"no backward pass reduces between ranks; if that is done elsewhere, in the step say, {advice}"

    def test_no_sync_ends_with_its_block(self, ranks: Ranks) -> None:
        """After an exception under no_sync, the next step is one that communicates."""
        self.needs(Capability.SAME_LOSSES)
        config = self.config("blocks")

        def reference() -> dict[str, Any]:
            run = Run("blocks", None)
            run.train(range(2))
            return run.full()

        def work() -> dict[str, Any]:
            run = Run("blocks", config)
            with pytest.raises(ZeroDivisionError), parallel_core.no_sync(run.model):
                raise ZeroDivisionError
            run.train(range(2))
            return run.full()

        (expected,) = ranks(reference, world_size=1, process_group=False)
        assert differences(ranks(work)[0], expected, tolerance=1e-5) == []

    def test_skips_a_step_on_all_ranks_or_none(self, ranks: Ranks) -> None:
        """With the strategy's gradient scaler, an overflow on one rank leaves the ranks with one model."""
        config = self.config("blocks")

        def work() -> list[str]:
            run = Run("blocks", config)
            assert run.optimizer is not None
            scaler = parallel_core.grad_scaler(run.model)
            index, _ = parallel_core.data_parallel(run.model)
            for seed in range(3):
                inputs, targets = run.case.batch(seed)
                loss = run.case.loss(run.model(inputs), targets)
                if scaler.is_enabled() and seed == 1 and index == 0:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(run.optimizer)
                scaler.update()
                run.optimizer.zero_grad()
            finite = all(bool(torch.isfinite(value).all()) for value in run.local().values())
            return collective.differing_tensors(held_whole(run)) + ([] if finite else ["a weight is not finite"])

        self.needs(Capability.SAME_LOSSES)
        assert ranks(work) == [[], []]

    def test_shares_out_the_data(self, ranks: Ranks, world_size: int) -> None:
        """Every rank reads one of `count` shares, and every share is read."""
        config = self.config("blocks")

        def work() -> tuple[int, int]:
            return parallel_core.data_parallel(Run("blocks", config).model)

        found = ranks(work, world_size=world_size)
        (count,) = {count for _, count in found}
        assert {index for index, _ in found} == set(range(count))

    def test_forgets_a_forward_without_a_backward(self, ranks: Ranks) -> None:
        """A forward with gradients enabled and no backward, before or between backward passes, changes no step."""
        self.needs(Capability.SAME_LOSSES)
        config = self.config("blocks")

        def work() -> list[str]:
            straight, run = Run("blocks", config, make_optimizer=sgd), Run("blocks", config, make_optimizer=sgd)
            for seed in range(3):
                straight.step(seed)
                run.model(run.case.batch(seed=9)[0])
                run.backward(seed)
                run.model(run.case.batch(seed=9)[0])
                if seed:
                    parallel_core.clip_grad_norm(run.model, 1e9)
                assert run.optimizer is not None
                run.optimizer.step()
                run.optimizer.zero_grad()
                run.model(run.case.batch(seed=9)[0])
                parallel_core.optimizer_state_dict(run.model, run.optimizer)
            accumulate(straight)
            accumulate(run, between=lambda: run.model(run.case.batch(seed=9)[0]))
            return differences(run.full(), straight.full(), tolerance=1e-6)

        for found in ranks(work):
            assert found == []


def held_whole(run: Run) -> dict[str, Any]:
    """Return the parameters of which every rank holds the whole."""
    parameters = {name for name, _ in run.case.build().named_parameters()}
    state_dict = parallel_core.model_state_dict(run.model, "sharded")
    return {
        name: state_dict[name] for name in state_dict if name in parameters and type(state_dict[name]) is torch.Tensor
    }


def accumulate(run: Run, *, between: Callable[[], object] = lambda: None) -> None:
    """Make one step of three micro-batches, with something done between them."""
    with parallel_core.no_sync(run.model):
        run.backward(seed=1)
        between()
        run.backward(seed=2)
    between()
    run.backward(seed=3)
    assert run.optimizer is not None
    run.optimizer.step()
    run.optimizer.zero_grad()


def reductions(run: Run) -> list[str]:
    """Return the reductions between ranks during a backward pass, by the names that torch's backends record."""
    inputs, targets = run.case.batch(seed=1)
    loss = run.case.loss(run.model(inputs), targets)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    return [event.key for event in profile.key_averages() if "reduce" in event.key and ":" in event.key]
