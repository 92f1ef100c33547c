"""State moves from any installed strategy to any other, and to the bare model, as the same bits."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

import parallel_core
from parallel_core import DistributedConfig
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import KINDS, Run, adamw, differences, momentum

# To measure takes half as long again as to run, and what runs here is measured where it is tried by itself.
pytestmark = pytest.mark.no_cover

CONFIGS = {
    "bare": None,
    "ddp": DistributedConfig(parallel_strategy="ddp"),
    "fsdp": DistributedConfig(parallel_strategy="fsdp", fsdp_mixed_precision="fp32", fsdp_auto_wrap_min_params=50),
    "fsdp2": DistributedConfig(parallel_strategy="fsdp2", fsdp2_mixed_precision="fp32", fsdp2_auto_wrap_min_params=50),
}
HYBRID = {
    "fsdp": DistributedConfig(
        parallel_strategy="fsdp",
        fsdp_mixed_precision="fp32",
        fsdp_auto_wrap_min_params=50,
        fsdp_sharding="hybrid",
        fsdp_hybrid_shard_size=2,
    ),
    "fsdp2": DistributedConfig(
        parallel_strategy="fsdp2",
        fsdp2_mixed_precision="fp32",
        fsdp2_wrap_layers=("Residual",),
        fsdp2_sharding="hybrid",
        fsdp2_hybrid_shard_size=2,
        fsdp2_activation_checkpointing=True,
    ),
}
MODELS = ("language_model", "small_parameters")
MORE_MODELS = ("adapter", "blocks", "buffers", "own_names")


def moved(case: str, start: Run, end: Run, kind: str) -> list[str]:
    """Load the state of one run into another, and return what is not the same bits then."""
    assert start.optimizer is not None
    assert end.optimizer is not None
    weights = parallel_core.model_state_dict(start.model, kind)
    state = parallel_core.optimizer_state_dict(start.model, start.optimizer, kind)
    parallel_core.load_model_state_dict(end.model, weights, kind)
    parallel_core.load_optimizer_state_dict(end.model, end.optimizer, state, kind)
    return [
        *differences(end.full(), start.full(), where=case),
        *differences(
            parallel_core.optimizer_state_dict(end.model, end.optimizer),
            parallel_core.optimizer_state_dict(start.model, start.optimizer),
            where=case,
        ),
    ]


@pytest.mark.parametrize(
    ("world_size", "models"),
    [
        (2, MODELS),
        *(pytest.param(*deep, marks=pytest.mark.deep) for deep in ((1, MODELS), (2, MORE_MODELS), (3, MODELS))),
    ],
)
def test_state_moves_from_each_to_each_and_trains_on(ranks: Ranks, world_size: int, models: tuple[str, ...]) -> None:
    """Weights and optimizer state, full and sharded, are the same bits under another strategy, and so is the step."""

    def work() -> list[str]:
        found = []
        for number, case in enumerate(models):
            make: Any = (adamw, momentum)[number % 2]
            runs = {name: Run(case, config, seed=number, make_optimizer=make) for name, config in CONFIGS.items()}
            runs["ddp"].train(range(2))
            for turn, (start, end) in enumerate([("ddp", "bare"), *permutations(CONFIGS, 2)]):
                lines = moved(case, runs[start], runs[end], KINDS[turn % 2])
                found += [f"{start} to {end}: {line}" for line in lines]
            if case != "buffers":  # its forward counts, in a buffer of each rank
                losses = {name: run.step(3) for name, run in runs.items() if name != "bare"}
                assert losses == pytest.approx(dict.fromkeys(losses, losses["ddp"]), abs=1e-5)
        return found

    assert ranks(work, world_size=world_size, timeout=120) == [[]] * world_size


@pytest.mark.parametrize("case", ["language_model", pytest.param("own_names", marks=pytest.mark.deep)])
def test_state_moves_to_and_from_groups_with_a_replica_each(ranks: Ranks, case: str) -> None:
    def work() -> list[str]:
        found = []
        start, end = Run(case, CONFIGS["ddp"]), Run(case, CONFIGS["ddp"], seed=5)
        start.train(range(2))
        for config in HYBRID.values():
            for kind in KINDS:
                middle = Run(case, config, seed=collective.rank())
                found += moved(case, start, middle, kind)
                found += moved(case, middle, end, kind)
        return found

    assert ranks(work, world_size=4, timeout=120) == [[]] * 4


def test_a_full_dict_goes_to_another_number_of_ranks(ranks: Ranks) -> None:
    """From each strategy on 2 ranks to each on 3: one call on either side, with the optimizer's state."""

    def save() -> list[Any]:
        saved = []
        for name, config in CONFIGS.items():
            run = Run("language_model", config)
            run.train(range(2 if config else 0))
            assert run.optimizer is not None
            saved.append((name, run.full(), parallel_core.optimizer_state_dict(run.model, run.optimizer)))
        return saved

    saved = [entry for entry in ranks(save)[0] if CONFIGS[entry[0]]]

    def load() -> list[str]:
        found = []
        for start, weights, state in saved:
            for end, config in CONFIGS.items():
                run = Run("language_model", config, seed=9)
                assert run.optimizer is not None
                parallel_core.load_model_state_dict(run.model, weights if collective.rank() == 0 else {})
                parallel_core.load_optimizer_state_dict(
                    run.model, run.optimizer, state if collective.rank() == 0 else None
                )
                again = parallel_core.optimizer_state_dict(run.model, run.optimizer)
                if collective.rank() == 0:
                    lines = [*differences(run.full(), weights), *differences(again, state)]
                    found += [f"{start} to {end}: {line}" for line in lines]
                else:
                    run.full()
        return found

    assert ranks(load, world_size=3, timeout=120) == [[]] * 3
