"""The state of any optimizer of torch comes back from a checkpoint by name, and reading it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_core
from parallel_core import DistributedConfig
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import KINDS, Run

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


def saved_and_loaded(strategy: str, folder: Path) -> list[str]:
    """Return which optimizers don't go on from a checkpoint as if they had never stopped."""
    found = []
    for name, make in OPTIMIZERS.items():
        if name in NOT_UNDER.get(strategy, ()):
            continue
        looked, untouched = (Run("blocks", CONFIGS[strategy], seed=2, make_optimizer=make) for _ in range(2))
        parallel_core.save_checkpoint(folder / "before", looked.model, looked.optimizer)
        train(looked, range(2))
        for kind in KINDS:
            parallel_core.save_checkpoint(folder / kind, looked.model, looked.optimizer, state_dict_type=kind)
        expected = train(untouched, range(4))[2:]
        if (losses := train(looked, range(2, 4))) != expected:
            found.append(f"{name}: a save changed the losses {expected} to {losses}")
        for kind in KINDS:
            run = Run("blocks", CONFIGS[strategy], seed=3, make_optimizer=make)
            parallel_core.load_checkpoint(folder / kind, run.model, run.optimizer)
            if (losses := train(run, range(2, 4))) != expected:
                found.append(f"{name}, {kind}: losses {losses}, without the stop {expected}")
    return found


@pytest.mark.parametrize("strategy", CONFIGS)
def test_training_goes_on_from_a_checkpoint_with_every_optimizer(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    """The losses that follow are those of a run which was neither saved nor stopped, to the last bit."""
    assert ranks(saved_and_loaded, strategy, tmp_path, timeout=120) == [[], []]
