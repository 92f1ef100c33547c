"""What an optimizer keeps of a parameter is found without touching it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from parallel_core import StateDictError, load_optimizer_state_dict, optimizer_state_dict
from parallel_core.optimizer_probe import Kind, kept_state

MOMENTS = {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.SGD(p), set()),
        (lambda p: torch.optim.SGD(p, momentum=0.9), {"momentum_buffer"}),
        (lambda p: torch.optim.AdamW(p), MOMENTS),
        (lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True), {*MOMENTS, "max_exp_avg_sq"}),
        (lambda p: torch.optim.Adamax(p), {"step", "exp_avg", "exp_inf"}),
        (lambda p: torch.optim.Adagrad(p), {"step", "sum"}),
        (lambda p: torch.optim.Adafactor(p), {"step", "row_var", "col_var"}),
        (lambda p: torch.optim.LBFGS(p), set()),  # wants a closure
        (lambda p: torch.optim.SparseAdam(p), set()),  # wants other gradients
    ],
)
def test_the_keys_are_those_after_a_step(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], expected: set[str]
) -> None:
    optimizer = make([nn.Parameter(torch.ones(3, 4))])
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("the optimizer was stepped"))
    before, groups = dict(optimizer.state), [dict(group) for group in optimizer.param_groups]
    assert kept_state(optimizer, optimizer.param_groups[0], 2).keys() == expected
    assert dict(optimizer.state) == before
    assert optimizer.param_groups == groups


def test_the_number_of_dimensions_counts() -> None:
    optimizer = torch.optim.Adafactor([nn.Parameter(torch.ones(3))])
    with torch.device("meta"):
        assert kept_state(optimizer, optimizer.param_groups[0], 1).keys() == {"step", "variance"}


def test_what_stands_under_a_key_is_told() -> None:
    parameter = nn.Parameter(torch.ones(3, 4))
    kept = kept_state(adam := torch.optim.AdamW([parameter]), adam.param_groups[0], 2)
    assert kept == {"step": Kind.NUMBER, "exp_avg": Kind.LIKE_PARAMETER, "exp_avg_sq": Kind.LIKE_PARAMETER}
    kept = kept_state(adafactor := torch.optim.Adafactor([parameter]), adafactor.param_groups[0], 2)
    assert kept == {"step": Kind.NUMBER, "row_var": Kind.OTHER, "col_var": Kind.OTHER}


class Own(torch.optim.SGD):
    """May do anything in its step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        pytest.fail("the optimizer was stepped")


def test_nothing_is_said_of_an_optimizer_that_is_not_torchs() -> None:
    optimizer = Own([nn.Parameter(torch.ones(3))])
    assert kept_state(optimizer, optimizer.param_groups[0], 1) == {}


def test_state_of_another_kind_of_optimizer_is_refused() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    other = torch.optim.Adamax(model.parameters())
    with pytest.raises(StateDictError, match="state without 'exp_inf', which Adamax keeps; it is another optimizer's"):
        load_optimizer_state_dict(model, other, optimizer_state_dict(model, optimizer))
    assert not other.state
