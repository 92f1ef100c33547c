"""State moves from any installed strategy to any other, and to the bare model, as the same bits."""

from __future__ import annotations

from typing import Any

import pytest

import parallel_core
from parallel_core import DistributedConfig
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import Run, adamw, differences, momentum
from parallel_core.testing.models import CASES

CONFIGS = {
    "ddp": DistributedConfig(parallel_strategy="ddp"),
    "fsdp": DistributedConfig(parallel_strategy="fsdp", fsdp_mixed_precision="fp32", fsdp_auto_wrap_min_params=50),
}
MODELS = ("blocks", "language_model", "buffers", "small_parameters", "adapter", "own_names")


@pytest.mark.parametrize(("make", "kind"), [(adamw, "full"), (momentum, "sharded")])
@pytest.mark.parametrize(("start", "end"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_state_moves_between_strategies_and_trains_on(ranks: Ranks, start: str, end: str, make: Any, kind: str) -> None:
    """Weights and optimizer state of one strategy, loaded under another, are the same bits, and so are the next."""

    def work() -> list[str]:
        found = []
        for case in MODELS:
            first = Run(case, CONFIGS[start], make_optimizer=make)
            first.train(range(2))
            second = Run(case, CONFIGS[end], seed=7, make_optimizer=make)
            assert first.optimizer is not None
            assert second.optimizer is not None
            weights = parallel_core.model_state_dict(first.model, kind)
            state = parallel_core.optimizer_state_dict(first.model, first.optimizer, kind)
            parallel_core.load_model_state_dict(second.model, weights, kind)
            parallel_core.load_optimizer_state_dict(second.model, second.optimizer, state, kind)
            found += differences(second.full(), first.full(), where=case)
            found += differences(
                parallel_core.optimizer_state_dict(second.model, second.optimizer),
                parallel_core.optimizer_state_dict(first.model, first.optimizer),
            )
            if case != "buffers":  # its forward counts, in a buffer of each rank
                losses = [[run.step(seed) for seed in (3, 4)] for run in (first, second)]
                assert losses[0] == pytest.approx(losses[1], abs=1e-5)
        return found

    assert ranks(work) == [[], []]


def test_a_full_dict_goes_round_through_all_of_them(ranks: Ranks) -> None:
    """From ddp to fsdp, to the bare model, and back to ddp: no bit is lost on the way."""

    def work() -> list[str]:
        found = []
        for case in MODELS:
            run = Run(case, CONFIGS["ddp"])
            run.train(range(2))
            expected = run.full()
            state = expected
            for config in (CONFIGS["fsdp"], None, CONFIGS["fsdp"], CONFIGS["ddp"]):
                model = CASES[case].build(seed=8)
                if config is not None:
                    wrapped = parallel_core.wrap_model_for_training(model, config)
                    assert wrapped is not None
                    model = wrapped
                parallel_core.load_model_state_dict(model, state if collective.rank() == 0 else {})
                state = parallel_core.model_state_dict(model)
                found += differences(state, expected, where=f"{case} {config}")
        return found

    assert ranks(work, world_size=3) == [[], [], []]
