"""The state of any optimizer of torch comes back from a checkpoint by name, and reading it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_core
from parallel_core import CheckpointError, DistributedConfig
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import KINDS, Run, differences

# To measure takes half as long again as to run, and what runs here is measured where it is tried by itself.
pytestmark = pytest.mark.no_cover

CONFIGS = {
    "ddp": DistributedConfig(parallel_strategy="ddp"),
    "fsdp": DistributedConfig(parallel_strategy="fsdp", fsdp_mixed_precision="fp32", fsdp_auto_wrap_min_params=50),
    "fsdp2": DistributedConfig(parallel_strategy="fsdp2", fsdp2_mixed_precision="fp32", fsdp2_auto_wrap_min_params=50),
}
Make = Callable[[Any], torch.optim.Optimizer]


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    """Make two groups with options of their own, one of them a tensor."""
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first], "lr": torch.tensor(0.02)}, {"params": others, "betas": (0.8, 0.9)}])


OPTIMIZERS: dict[str, Make] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam with amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "AdamW in groups": in_groups,
    "AdamW that is capturable": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), foreach=False),
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD without state": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}
# LBFGS computes with all parameters laid end to end, and fsdp shows it pieces of them; torch lacks operations on
# DTensors that the other two need for a step.
NOT_UNDER = {"fsdp": {"LBFGS"}, "fsdp2": {"Adafactor", "Rprop"}}
# Whose states differ most: in groups, of other shapes, in one entry for all parameters, with a tensor as an option.
TELLING = {"AdamW in groups", "Adafactor", "LBFGS", "AdamW that is capturable"}


def train(run: Run, seeds: range) -> list[float]:
    """Take steps with a closure, as some optimizers need it, and return the losses of this rank."""
    optimizer = run.optimizer
    assert optimizer is not None
    losses = []
    for seed in seeds:

        def closure(seed: int = seed) -> float:
            optimizer.zero_grad()
            return run.backward(seed)

        losses.append(float(optimizer.step(closure)))
    return losses


def saved_and_loaded(strategy: str, folder: Path, names: list[str]) -> list[str]:
    """Return which optimizers don't go on from a checkpoint as if they had never stopped."""
    found = []
    for name in names:
        make = OPTIMIZERS[name]
        looked, untouched = (Run("own_names", CONFIGS[strategy], seed=2, make_optimizer=make) for _ in range(2))
        parallel_core.save_checkpoint(folder / "before", looked.model, looked.optimizer)
        train(looked, range(2))
        for kind in KINDS:
            parallel_core.save_checkpoint(folder / kind, looked.model, looked.optimizer, state_dict_type=kind)
        expected = train(untouched, range(4))[2:]
        if (losses := train(looked, range(2, 4))) != expected:
            found.append(f"{name}: a save changed the losses {expected} to {losses}")
        for kind in KINDS:
            run = Run("own_names", CONFIGS[strategy], seed=3, make_optimizer=make)
            parallel_core.load_checkpoint(folder / kind, run.model, run.optimizer)
            if (losses := train(run, range(2, 4))) != expected:
                found.append(f"{name}, {kind}: losses {losses}, without the stop {expected}")
    return found


def test_a_scheduler_may_come_and_go_between_save_and_load(tmp_path: Path) -> None:
    """What a scheduler keeps in the optimizer's groups is neither asked for nor lost."""
    alone, scheduled = (Run("blocks", None, seed=seed) for seed in (1, 2))
    assert alone.optimizer is not None
    assert scheduled.optimizer is not None
    torch.optim.lr_scheduler.OneCycleLR(scheduled.optimizer, 0.5, total_steps=9)
    options = dict(scheduled.optimizer.param_groups[0])
    parallel_core.save_checkpoint(tmp_path / "alone", alone.model, alone.optimizer)
    parallel_core.load_checkpoint(tmp_path / "alone", scheduled.model, scheduled.optimizer)
    group = scheduled.optimizer.param_groups[0]
    assert {key: group[key] for key in ("initial_lr", "max_lr", "min_lr")} == {
        key: options[key] for key in ("initial_lr", "max_lr", "min_lr")
    }
    assert group["lr"] == alone.optimizer.param_groups[0]["lr"]
    state = parallel_core.optimizer_state_dict(alone.model, alone.optimizer)
    parallel_core.load_optimizer_state_dict(scheduled.model, scheduled.optimizer, state)


class InFullPrecision(torch.optim.Optimizer):
    """Keeps an average in fp32, whatever the parameters are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # takes no closure
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:  # under fsdp, where this rank has nothing of the parameter
                continue
            average = self.state[parameter].setdefault("average", torch.zeros_like(parameter, dtype=torch.float32))
            average.lerp_(parameter.grad.float(), 0.1)
            parameter.data.sub_(average)


def test_state_keeps_its_dtype_where_it_is_not_the_parameters(ranks: Ranks, tmp_path: Path) -> None:
    """torch's own `load_state_dict` casts it."""

    def work() -> list[str]:
        found = []
        for strategy, config in CONFIGS.items():
            models = []
            for _ in range(2):
                bare = torch.nn.Linear(6, 6, dtype=torch.bfloat16)
                wrapped = parallel_core.wrap_model_for_training(bare, config) or bare
                models.append((wrapped, InFullPrecision(wrapped.parameters())))
            (model, optimizer), (other, loaded) = models
            model(torch.ones(2, 6, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
            parallel_core.save_checkpoint(tmp_path / "a", model, optimizer)
            parallel_core.load_checkpoint(tmp_path / "a", other, loaded)
            found += differences(
                parallel_core.optimizer_state_dict(other, loaded),
                parallel_core.optimizer_state_dict(model, optimizer),
                where=strategy,
            )
        return found

    assert ranks(work) == [[], []]


def test_state_of_whole_parameters_is_refused_under_fsdp(ranks: Ranks, tmp_path: Path) -> None:
    """Which shows an optimizer pieces of parameters: what says something about a whole one can't be kept or used."""

    def work() -> list[str]:
        def run(name: str, strategy: str) -> Run:
            return Run("blocks", CONFIGS[strategy], make_optimizer=OPTIMIZERS[name])

        pieces, whole, other = run("LBFGS", "fsdp"), run("Adafactor", "ddp"), run("Adafactor", "fsdp")
        train(pieces, range(1))
        train(whole, range(1))
        before = other.full()
        with pytest.raises(CheckpointError) as not_saved:
            parallel_core.save_checkpoint(tmp_path / "pieces", pieces.model, pieces.optimizer)
        parallel_core.save_checkpoint(tmp_path / "whole", whole.model, whole.optimizer)
        with pytest.raises(CheckpointError) as not_loaded:
            parallel_core.load_checkpoint(tmp_path / "whole", other.model, other.optimizer)
        assert differences(other.full(), before) == []
        return [str(not_saved.value), str(not_loaded.value)]

    first, second = ranks(work)
    assert first == second
    assert "it says nothing about the whole parameter; use another strategy for this optimizer (ddp)" in first[0]
    assert "state without 'variance', which Adafactor keeps; it is another optimizer's, or from a strategy" in first[1]


@pytest.mark.parametrize("names", [TELLING, pytest.param(OPTIMIZERS.keys() - TELLING, marks=pytest.mark.deep)])
@pytest.mark.parametrize("strategy", CONFIGS)
def test_training_goes_on_from_a_checkpoint_with_every_optimizer(
    ranks: Ranks, tmp_path: Path, strategy: str, names: set[str]
) -> None:
    """The losses that follow are those of a run which was neither saved nor stopped, to the last bit."""
    possible = sorted(names - NOT_UNDER.get(strategy, set()))
    assert ranks(saved_and_loaded, strategy, tmp_path, possible, timeout=120) == [[], []]
