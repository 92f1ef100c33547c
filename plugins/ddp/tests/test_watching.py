"""What DistributedDataParallel does not tell is an error: gradients not averaged, parameters it knows nothing of."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import parallel_core
from parallel_core import DistributedConfig, TrainingError
from parallel_core import ranks as collective
from parallel_core.outputs import tensors_in
from parallel_core.testing import Ranks


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))


def wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    answer = parallel_core.wrap_model_for_training(model, DistributedConfig(parallel_strategy="ddp", **settings))
    assert answer is not None
    return answer


def backward(model: nn.Module, *, fails: bool = False) -> None:
    model(torch.ones(2, 4) * (collective.rank() + 1)).sum().backward()
    if fails:
        raise ZeroDivisionError


def norm(model: nn.Module) -> float | str:
    try:
        return round(parallel_core.clip_grad_norm(model, 1e9).item(), 3)
    except TrainingError as error:
        return str(error)[:46]


WAITING = "gradients were accumulated under no_sync and n"


def test_one_backward_pass_of_two_forwards_averages_both_where_one_was_outside(ranks: Ranks) -> None:
    def work() -> list[Any]:
        found = []
        for first_waits in (True, False):
            model = wrapped(layers())
            losses = []
            for waits in (first_waits, not first_waits):
                with parallel_core.no_sync(model) if waits else nullcontext():
                    losses.append(model(torch.ones(2, 4) * (collective.rank() + 1)).sum())
            sum(losses).backward()
            found.append(norm(model))
            with parallel_core.no_sync(model):
                backward(model)
            found.append(norm(model))
        return found

    first, second = ranks(work)
    assert first == second
    assert first == [first[0], WAITING, first[0], WAITING]
    assert isinstance(first[0], float)


def test_gradients_that_wait_for_the_other_ranks_are_an_error_until_they_are_averaged_or_zeroed(ranks: Ranks) -> None:
    def work() -> list[Any]:
        model = wrapped(layers())
        optimizer = parallel_core.wrap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        backward(model)
        found: list[Any] = [norm(model)]
        optimizer.zero_grad()
        with parallel_core.no_sync(model):
            backward(model)
        with torch.no_grad():
            model(torch.ones(2, 4))  # changes nothing
        found.append(norm(model))
        with pytest.raises(TrainingError):
            optimizer.step()
        backward(model)
        found.append(norm(model))  # of twice the sum
        with pytest.raises(ZeroDivisionError), parallel_core.no_sync(model):
            backward(model, fails=True)
        twin = copy.deepcopy(model)  # without gradients, as torch has it
        found.append([norm(twin), norm(model)])
        twin.zero_grad()
        backward(twin)
        found.append([norm(twin), norm(model)])
        model.zero_grad()
        return [*found, norm(model)]

    first, second = ranks(work)
    assert first == second
    once = first[0]
    assert first[1:] == [WAITING, pytest.approx(2 * once, abs=0.002), [0.0, WAITING], [once, WAITING], 0.0]


def test_what_trains_is_settled_at_the_wrap(ranks: Ranks) -> None:
    def thawed(part: int | None) -> nn.Module:
        model = layers()
        (model if part is None else model[part]).requires_grad_(False)
        answer = wrapped(model)
        answer.requires_grad_(True)
        return answer

    def frozen(**settings: Any) -> nn.Module:
        inner = layers()
        answer = wrapped(inner, **settings)
        inner[1].requires_grad_(False)
        return answer

    def work() -> list[str]:
        found = []
        for model in (thawed(0), thawed(None), frozen()):
            with torch.no_grad():
                model(torch.ones(2, 4))  # to evaluate is no matter
            with pytest.raises(TrainingError) as caught:
                backward(model)
            found.append(str(caught.value))
        allowed = frozen(ddp_find_unused_parameters=True)
        for _ in range(2):
            backward(allowed)
        critic = wrapped(layers())
        backward(critic)
        before = norm(critic)
        critic.zero_grad()
        critic.requires_grad_(False)  # while what is before it in the loss trains
        critic(torch.ones(2, 4).requires_grad_()).sum().backward()
        critic.requires_grad_(True)
        backward(critic)
        return [*found, str(before == norm(critic))]

    thaw = (
        "parameter '0.weight' needs a gradient now and needed none at the wrap, so that ddp would never average it; "
        "set requires_grad before the wrap"
    )
    freeze = (
        "parameter '1.weight' was frozen after the wrap, and ddp waits for its gradient; set requires_grad before the "
        "wrap, or set ddp_find_unused_parameters = true"
    )
    assert ranks(work) == [[thaw, thaw, freeze, "True"]] * 2


@dataclass
class Output:
    loss: torch.Tensor


class Opaque:
    """Of a kind that nobody looks into."""

    def __init__(self, loss: torch.Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    "packed",
    [
        lambda loss: {"loss": (loss,), "other": None},
        lambda loss: [Output(loss)],
        lambda loss: UserDict(loss=loss),
        lambda loss: Opaque(loss),
    ],
)
def test_outputs_of_any_form_are_watched(ranks: Ranks, packed: Callable[[torch.Tensor], Any]) -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return packed(self.layer(x).sum())

    def work() -> float | str:
        model = wrapped(Several())
        with parallel_core.no_sync(model):
            output = model(torch.ones(2, 4))
            (loss,) = [output.loss] if isinstance(output, Opaque) else tensors_in(output)
            loss.backward()
        return norm(model)

    assert ranks(work) == [WAITING] * 2
