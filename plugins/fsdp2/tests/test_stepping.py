"""What fsdp2 does around a step: gradients that wait or are zeroed, unused parameters, inference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import parallel_core
from parallel_core import DistributedConfig, TrainingError
from parallel_core import ranks as collective
from parallel_core.testing import Ranks


class Two(nn.Module):
    """A parameter of its own, which is in the root, before and after a unit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(4))
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x * self.scale)
        return out


def wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    named = {"mixed_precision": "fp32", "auto_wrap_min_params": 0, **settings}
    config = DistributedConfig(parallel_strategy="fsdp2", **{f"fsdp2_{name}": value for name, value in named.items()})
    answer = parallel_core.wrap_model_for_training(model, config)
    assert answer is not None
    return answer


def loss(model: nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(torch.ones(2, 4) * (collective.rank() + 1)).float().sum()
    return found


def norm(model: nn.Module) -> float:
    return parallel_core.clip_grad_norm(model, 1e9).item()


@pytest.mark.parametrize(
    "settings",
    [{}, {"mixed_precision": "bf16", "reduce_precision": "fp32"}, {"sharding": "grad_op"}, {"auto_wrap_min_params": 9}],
)
def test_what_waits_for_the_other_ranks_is_zeroed_with_the_rest(ranks: Ranks, settings: dict[str, Any]) -> None:
    """`fully_shard` keeps it where zero_grad of torch does not look."""

    def work() -> list[Any]:
        model = wrapped(Two(), **settings)
        optimizer = parallel_core.wrap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        loss(model).backward()
        once, found = norm(model), []
        for owner in (model, optimizer):
            for set_to_none in (True, False):
                owner.zero_grad(set_to_none)
                with parallel_core.no_sync(model):
                    (loss(model) * 1000).backward()
                owner.zero_grad(set_to_none)
                loss(model).backward()
                found.append(norm(model))
                result = loss(model)
                owner.zero_grad(set_to_none)  # while the root is gathered
                result.backward()
                found.append(norm(model))
        model.zero_grad()
        gone = [parameter.grad is None for parameter in model.parameters()]
        return [once > 0, [each == pytest.approx(once) for each in found], set(gone)]

    assert ranks(work) == [[True, [True] * 8, {True}]] * 2


def test_zeroing_a_part_leaves_the_rest(ranks: Ranks) -> None:
    def work() -> list[bool]:
        model = wrapped(Two())
        layer = model.get_submodule("layer")
        only = parallel_core.wrap_optimizer(model, torch.optim.SGD([model.get_parameter("scale")], lr=0.1))

        def gradients() -> list[float]:
            loss(model).backward()
            found = [parameter.grad for parameter in model.parameters()]
            model.zero_grad()
            return [each.full_tensor().sum().item() for each in found if isinstance(each, DTensor)]

        scale, *of_layer = gradients()
        found = []
        for owner, expected in (
            (only, [scale, *(2 * each for each in of_layer)]),
            (layer, [2 * scale, *of_layer]),
        ):
            with parallel_core.no_sync(model):
                loss(model).backward()
            owner.zero_grad()
            found.append(gradients() == pytest.approx(expected))
        return found

    assert ranks(work) == [[True, True]] * 2


@pytest.mark.parametrize("settings", [{}, {"mixed_precision": "bf16", "reduce_precision": "fp32"}])
def test_gradients_that_wait_for_the_other_ranks_are_an_error(ranks: Ranks, settings: dict[str, Any]) -> None:
    def work() -> list[bool]:
        model = wrapped(Two(), **settings)
        optimizer = parallel_core.wrap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        before_any = norm(model)
        loss(model).backward()
        once = norm(model)
        model.zero_grad()
        with parallel_core.no_sync(model):
            loss(model).backward()
        with pytest.raises(TrainingError, match="never synchronised"):
            parallel_core.clip_grad_norm(model, 1.0)
        with pytest.raises(TrainingError, match="never synchronised"):
            optimizer.step()
        loss(model).backward()
        return [before_any == 0, norm(model) == pytest.approx(2 * once, rel=1e-2)]

    assert ranks(work) == [[True, True]] * 2


class Choice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.other if collective.rank() else self.one)


def test_ranks_may_use_different_parameters_of_a_unit_if_it_is_said(ranks: Ranks) -> None:
    def work() -> list[list[float]]:
        model = wrapped(Choice(), reduce_unused_parameters=True)
        found = []
        for accumulates in (False, True):
            if accumulates:
                with parallel_core.no_sync(model):
                    loss(model).backward()
            loss(model).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            found.append([each.full_tensor()[0].item() for each in gradients if isinstance(each, DTensor)])
            model.zero_grad()
        return found

    # Two rows of 1 on rank 0 alone, two rows of 2 on rank 1 alone; the mean over both ranks.
    assert ranks(work) == [[[1.0, 2.0], [2.0, 4.0]]] * 2


@pytest.mark.parametrize("settings", [{}, {"mixed_precision": "bf16"}, {"activation_checkpointing": True}])
def test_a_model_may_be_used_for_inference_before_it_trains(ranks: Ranks, settings: dict[str, Any]) -> None:
    def work() -> list[bool]:
        model, other = wrapped(Two(), **settings), wrapped(Two(), **settings)
        with torch.inference_mode():
            loss(model)
            parallel_core.model_state_dict(model)
        for each in (model, other):
            optimizer = parallel_core.wrap_optimizer(each, torch.optim.SGD(each.parameters(), lr=0.1))
            for _ in range(2):
                loss(each).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.inference_mode():
                    loss(each)
        parallel_core.model_state_dict(model)  # cuts again what an evaluation has left whole
        parallel_core.model_state_dict(other)
        pairs: Any = zip(model.parameters(), other.parameters(), strict=True)
        return [torch.equal(one.full_tensor(), two.full_tensor()) for one, two in pairs]

    assert ranks(work) == [[True] * 3] * 2


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("norm_type", [math.inf, -math.inf, -1.0, 1.0, 2.0])
def test_a_rank_without_a_part_of_a_gradient_has_no_part_in_the_norm(
    ranks: Ranks, norm_type: float, world_size: int
) -> None:
    """torch takes no largest element of nothing, on that rank alone."""

    def work() -> list[Any]:
        bare, model = Two(), wrapped(Two())  # a bias of one element
        for each in (bare, model):
            each(torch.ones(2, 4)).sum().backward()
        expected = nn.utils.clip_grad_norm_(bare.parameters(), 0.5, norm_type)
        found = parallel_core.clip_grad_norm(model, 0.5, norm_type)
        pairs = zip(bare.parameters(), model.parameters(), strict=True)
        same = [torch.allclose(one.grad, two.grad.full_tensor()) for one, two in pairs]  # type: ignore[union-attr, arg-type]  # DTensors
        return [found.item() == pytest.approx(expected.item(), rel=1e-5), type(found), *same]

    assert ranks(work, world_size=world_size) == [[True, torch.Tensor, True, True, True]] * world_size
