"""Units that are computed again in the backward pass."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from parallel_core.names import bare_names, unwrapped
from parallel_core.recomputation import recompute_units
from parallel_core.record import Layout
from parallel_core.testing.models import CASES
from parallel_core.units import choose_units


def recomputed(model: nn.Module, min_params: int) -> list[str]:
    """Recompute the units of a model; return the bare names of what stands in their places."""
    standing = recompute_units(model, choose_units(model, min_params))
    assert all(isinstance(module, CheckpointWrapper) for module in standing)
    bare = bare_names(model)
    return [bare(f"{name}.x")[:-2] for name, module in model.named_modules() if module in standing]


def test_nested_units_are_each_put_into_a_wrapper() -> None:
    assert recomputed(CASES["blocks"].build(), 80) == [
        name for index in range(2) for name in (f"blocks.{index}", f"blocks.{index}.up")
    ]


def test_gradients_are_the_same_and_the_layout_is_the_bare_models() -> None:
    plain, model = CASES["blocks"].build(), CASES["blocks"].build()
    recomputed(model, 80)
    assert Layout.of(model) == Layout.of(plain)
    inputs, targets = CASES["blocks"].batch(seed=0)
    for each in (plain, model):
        CASES["blocks"].loss(each(inputs), targets).backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_buffers_are_changed_once_and_stay_the_objects_they_were() -> None:
    plain, model = (nn.Sequential(CASES["buffers"].build(), CASES["batch_norm"].build()) for _ in range(2))
    before = {name: id(buffer) for name, buffer in model[1].named_buffers()}
    recompute_units(model, choose_units(model, 0, classes=("Buffers", "Sequential")))
    for each in (plain, model):
        each(torch.ones(4, 6)).sum().backward()
    for one, other in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(one, other)
    assert before == {name: id(buffer) for name, buffer in unwrapped(model[1]).named_buffers()}


def test_the_second_forward_has_the_buffers_of_the_first() -> None:
    """A spectral norm takes a step in each forward, and computes from where it stands."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))

    plain, model = make(), make()
    recompute_units(model, choose_units(model, 0))
    for each in (plain, model):
        each(torch.ones(2, 4)).square().sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_unit_that_is_in_a_wrapper_already_stays_in_it_alone() -> None:
    model = CASES["blocks"].build()
    once = recompute_units(model, choose_units(model, 168))
    assert recompute_units(model, choose_units(model, 168)) == once


def test_the_wrapper_is_in_the_mode_of_what_is_inside() -> None:
    model = CASES["blocks"].build()
    model.get_submodule("blocks.1").eval()
    recomputed(model, 168)
    assert [model.get_submodule(f"blocks.{index}").training for index in range(2)] == [True, False]
