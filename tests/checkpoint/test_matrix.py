"""A checkpoint saved by any strategy, as either kind, loads under any other on another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import parallel_core
from parallel_core import DistributedConfig
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import KINDS, Run, adamw, differences, momentum

CONFIGS = {
    "bare": None,
    "ddp": DistributedConfig(parallel_strategy="ddp"),
    "fsdp": DistributedConfig(parallel_strategy="fsdp", fsdp_mixed_precision="fp32", fsdp_auto_wrap_min_params=50),
    "fsdp2": DistributedConfig(parallel_strategy="fsdp2", fsdp2_mixed_precision="fp32", fsdp2_auto_wrap_min_params=50),
}
SAVED_BY = {"bare": 1, "ddp": 2, "fsdp": 2, "fsdp2": 2}
LOADED_BY = {"bare": 1, "ddp": 2, "fsdp": 3, "fsdp2": 3}
MODELS = {"language_model": adamw, "adapter": momentum, "small_parameters": adamw}


class Reference(NamedTuple):
    """What a run was when it was saved, and what it went on to: weights, optimizer state, losses."""

    weights: dict[str, Any]
    optimizer: dict[str, Any]
    losses: list[float]


def save(strategy: str, folder: Path, models: tuple[str, ...]) -> dict[str, Reference]:
    """Train each model for two steps, save it as both kinds, and train on."""
    found = {}
    for case in models:
        run = Run(case, CONFIGS[strategy], seed=5, make_optimizer=MODELS[case])
        run.train(range(2))
        assert run.optimizer is not None
        for kind in KINDS:
            parallel_core.save_checkpoint(
                folder / f"{case}-{strategy}-{kind}", run.model, run.optimizer, state_dict_type=kind, extra={"step": 2}
            )
        state = parallel_core.optimizer_state_dict(run.model, run.optimizer)
        found[case] = Reference(run.full(), state, run.train(range(2, 4)))
    return found


def load(strategy: str, folder: Path, references: dict[str, dict[str, Reference]]) -> list[str]:
    """Load each checkpoint into a model with other values, and return what is not as it was saved."""
    found = []
    for saved_by, kind in [(saved_by, kind) for saved_by in references for kind in KINDS]:
        for case, reference in references[saved_by].items():
            where = f"{case}, saved by {saved_by} as {kind}, loaded by {strategy}"
            run = Run(case, CONFIGS[strategy], seed=8, make_optimizer=MODELS[case])
            loaded = parallel_core.load_checkpoint(folder / f"{case}-{saved_by}-{kind}", run.model, run.optimizer)
            assert loaded == parallel_core.LoadedCheckpoint({"step": 2}, [], [])
            assert run.optimizer is not None
            if parallel_core.ranks.rank() == 0:
                found += differences(run.full(), reference.weights, where=where)
                state = parallel_core.optimizer_state_dict(run.model, run.optimizer)
                found += differences(state, reference.optimizer, where=where)
            else:
                run.full()
                parallel_core.optimizer_state_dict(run.model, run.optimizer)
            losses = run.train(range(2, 4))
            if losses != pytest.approx(reference.losses, abs=1e-5):
                found.append(f"{where}: losses {losses}, without the stop {reference.losses}")
    return found


@pytest.mark.parametrize(
    "models", [("language_model",), pytest.param(("adapter", "small_parameters"), marks=pytest.mark.deep)]
)
def test_each_loads_what_each_saved_and_trains_on(ranks: Ranks, tmp_path: Path, models: tuple[str, ...]) -> None:
    """Weights and optimizer state are the same bits, and the losses are those of the run that never stopped."""
    references = {
        strategy: ranks(save, strategy, tmp_path, models, world_size=world_size, process_group=world_size > 1)[0]
        for strategy, world_size in SAVED_BY.items()
    }
    for strategy, world_size in LOADED_BY.items():
        found = ranks(
            load, strategy, tmp_path, references, world_size=world_size, process_group=world_size > 1, timeout=120
        )
        assert found == [[]] * world_size
