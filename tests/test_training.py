"""Gradients that a strategy has not averaged are neither clipped nor stepped with, whatever the strategy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("x",), "max_norm: expected a number, found 'x'"),
        ((None,), "max_norm: expected a number, found None"),
        ((True,), "max_norm: expected a number, found True"),
        ((math.nan,), "max_norm: expected a number, found nan"),
        ((torch.ones(2),), "max_norm: expected a number, found tensor([1., 1.])"),
        ((-1,), "max_norm: expected a number from 0 on, found -1, which would turn the step back"),
        ((1.0, "inf"), "norm_type: expected a number, found 'inf'"),
        ((1.0, math.nan), "norm_type: expected a number, found nan"),
    ],
)
def test_what_is_no_norm_is_refused(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(TrainingError) as caught:
        clip_grad_norm(nn.Linear(2, 1), *arguments)
    assert str(caught.value) == told


def test_sparse_gradients_are_not_clipped() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(TrainingError) as caught:
        clip_grad_norm(model, 1.0)
    assert str(caught.value) == (
        "there are sparse gradients, whose norm torch can't take; set sparse=False, or do not clip"
    )


@pytest.mark.parametrize("arguments", [(1,), (torch.tensor(1.0),), (math.inf,), (0,), (1.0, math.inf), (1.0, 0)])
def test_every_number_that_is_a_norm_is_taken(arguments: tuple[Any, ...]) -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    expected = {math.inf: 1.0, 0: 2.0}.get(arguments[1] if len(arguments) > 1 else 2, math.sqrt(3))
    assert clip_grad_norm(model, *arguments).item() == pytest.approx(expected)
