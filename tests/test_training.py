"""Gradients that a strategy has not averaged are neither clipped nor stepped with, whatever the strategy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import parallel_core
from parallel_core import TrainingError, clip_grad_norm, wrap_model_for_training, wrap_optimizer

WAITING = """
from parallel_core import StrategyConfig, hookimpl

class WaitingConfig(StrategyConfig):
    pass

@hookimpl
def strategy_config():
    return WaitingConfig

@hookimpl
def applies():
    return True

@hookimpl
def wrap_model(model):
    model.waits = True
    return model

@hookimpl
def has_unsynchronised_gradients(model):
    return model.waits
"""


def test_neither_clipping_nor_a_step_takes_gradients_that_wait(install_strategy: Callable[..., str]) -> None:
    install_strategy("waiting", WAITING)
    model = wrap_model_for_training(nn.Linear(2, 1), parallel_core.DistributedConfig(parallel_strategy="waiting"))
    assert model is not None
    optimizer = wrap_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = [parameter.clone() for parameter in model.parameters()]
    model(torch.ones(1, 2)).sum().backward()
    message = "gradients were accumulated under no_sync and never synchronised; run the last micro-batch outside"
    with pytest.raises(TrainingError, match=message):
        clip_grad_norm(model, 1.0)
    with pytest.raises(TrainingError, match=message):
        optimizer.step()
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    vars(model)["waits"] = False
    assert clip_grad_norm(model, 1e9) > 0
    optimizer.step()
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
