"""What fsdp does around a step: the norm, gradients that wait, what is prepared, the mode."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import parallel_core
from parallel_core import DistributedConfig, TrainingError
from parallel_core import ranks as collective
from parallel_core.testing import Ranks


class ToDouble(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


def layers(kind: str = "float") -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if kind == "double":
        return model.double()
    if kind == "both":
        return nn.Sequential(model[0], ToDouble(), model[2].double())
    return model.to(getattr(torch, kind))


def wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    named = {"mixed_precision": "fp32", "auto_wrap_min_params": 0, **settings}
    config = DistributedConfig(parallel_strategy="fsdp", **{f"fsdp_{name}": value for name, value in named.items()})
    answer = parallel_core.wrap_model_for_training(model, config)
    assert answer is not None
    return answer


def batch(model: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(4, 4).to(next(model.parameters()).dtype)


@pytest.mark.parametrize("kind", ["float", "double", "both", "bfloat16", "half"])
def test_every_norm_is_that_of_one_process_in_every_dtype(ranks: Ranks, kind: str) -> None:
    norm_types = (2.0, 1.0, 0.5, 0.0, -1.0, math.inf, -math.inf) if kind == "float" else (2.0, math.inf)

    def work() -> list[Any]:
        found = []
        bare, model = layers(kind), wrapped(layers(kind))
        inputs = batch(bare)
        bare(inputs).square().mean().backward()
        model(inputs).square().mean().backward()
        for norm_type in norm_types:
            expected = nn.utils.clip_grad_norm_(bare.parameters(), 0.9, norm_type)
            norm = parallel_core.clip_grad_norm(model, 0.9, norm_type)
            tolerance = 1e-5 if expected.dtype is torch.float32 else 1e-2
            tolerance = 1e-12 if expected.dtype is torch.float64 and kind == "double" else tolerance
            found.append((norm.dtype is expected.dtype, norm.item() == pytest.approx(expected.item(), rel=tolerance)))
        return found

    assert ranks(work) == [[(True, True)] * len(norm_types)] * 2


def test_without_gradients_the_norm_is_nothing(ranks: Ranks) -> None:
    def work() -> list[float]:
        models = (wrapped(layers()), wrapped(layers().requires_grad_(False)), wrapped(nn.Sequential(nn.Tanh())))
        return [parallel_core.clip_grad_norm(model, 1.0).item() for model in models]

    assert ranks(work) == [[0.0, 0.0, 0.0]] * 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_that_wait_for_the_other_ranks_are_an_error_until_they_are_averaged_or_zeroed(
    ranks: Ranks, precision: str
) -> None:
    def work() -> list[bool]:
        model = wrapped(layers(), mixed_precision=precision)
        optimizer = parallel_core.wrap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))

        def backward(factor: float = 1.0) -> None:
            (model(torch.ones(2, 4)) * (collective.rank() + 1) * factor).sum().backward()

        def norm() -> float:
            found = parallel_core.clip_grad_norm(model, 1e9).item()
            model.zero_grad()
            return found

        backward()
        once = norm()
        found = []
        for owner, set_to_none in ((model, True), (model, False), (optimizer, True), (optimizer, False)):
            with parallel_core.no_sync(model):
                backward(1000)
            with pytest.raises(TrainingError, match="never synchronised"):
                parallel_core.clip_grad_norm(model, 1.0)
            with pytest.raises(TrainingError, match="never synchronised"):
                optimizer.step()
            owner.zero_grad(set_to_none)
            backward()
            found.append(norm() == pytest.approx(once))
        with parallel_core.no_sync(model):
            backward()
        backward()
        return [*found, norm() == pytest.approx(2 * once, rel=1e-2)]

    assert ranks(work) == [[True] * 5] * 2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("first", ["forward", "state_dict"])
def test_a_model_may_be_used_for_inference_before_it_trains(ranks: Ranks, first: str, precision: str) -> None:
    def work() -> list[bool]:
        model, other = wrapped(layers(), mixed_precision=precision), wrapped(layers(), mixed_precision=precision)
        with torch.inference_mode():
            if first == "forward":
                model(torch.ones(2, 4))
            else:
                parallel_core.model_state_dict(model)
        for each in (model, other):
            optimizer = parallel_core.wrap_optimizer(each, torch.optim.SGD(each.parameters(), lr=0.1))
            for _ in range(2):
                each(torch.ones(2, 4)).float().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.inference_mode():
                    each(torch.ones(2, 4))
        return [torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True)]

    assert ranks(work) == [[True] * 4] * 2


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}])
def test_each_wrapper_is_in_the_mode_of_what_is_inside(ranks: Ranks, settings: dict[str, Any]) -> None:
    def work() -> list[set[bool]]:
        mixed = layers()
        mixed[0].eval()
        model = wrapped(mixed, **settings)
        inner = model.get_submodule("_fsdp_wrapped_module.0")
        whole = wrapped(layers().eval(), **settings)
        return [
            {model.training},
            {module.training for module in inner.modules()},
            {module.training for module in whole.modules()},
        ]

    assert ranks(work) == [[{True}, {False}, {False}]] * 2


@dataclass
class Output:
    """What a model returns, as many libraries have it."""

    value: torch.Tensor


class Packing(nn.Module):
    """Returns its results in a dataclass, and so does the unit in it: a view, which is changed in place."""

    def __init__(self, *, inside: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4) if not inside else Packing(inside=False)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Output:
        found = self.first(x)
        y = found.value if isinstance(found, Output) else found
        y += x
        return Output(self.second(y))


def test_a_dataclass_is_looked_into_wherever_outputs_are(ranks: Ranks) -> None:
    inputs = torch.ones(2, 3, 4)

    def work() -> list[Any]:
        bare, model = Packing(), wrapped(Packing())
        for each in (bare, model):
            each(inputs).value.square().mean().backward()
        same = norm_of(model) == pytest.approx(norm_of(bare), rel=1e-5)
        model = wrapped(Packing(), mixed_precision="bf16")
        model(inputs)
        model(inputs).value.float().mean().backward()  # the forward before it is forgotten
        trains = norm_of(model) > 0
        kept = model(inputs)
        with pytest.raises(TrainingError) as caught:
            model(inputs).value.float().mean().backward()
        del kept
        return [same, trains, str(caught.value).partition(":")[0]]

    assert ranks(work) == [[True, True, "the gradients of this backward pass are lost"]] * 2


def norm_of(model: nn.Module) -> float:
    return parallel_core.clip_grad_norm(model, 1e9).item()
