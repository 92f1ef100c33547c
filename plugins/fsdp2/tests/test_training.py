"""What fsdp2 does with a step: parity under each sharding, overflow, and views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import parallel_core
from parallel_core import DistributedConfig
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import Run, differences, for_each, trained_and_reloaded


def config(**settings: Any) -> DistributedConfig:
    named = {"mixed_precision": "fp32", "auto_wrap_min_params": 50, **settings}
    return DistributedConfig(parallel_strategy="fsdp2", **{f"fsdp2_{name}": value for name, value in named.items()})


@pytest.mark.parametrize(
    "cases", [("language_model", "buffers"), pytest.param(("small_parameters", "adapter"), marks=pytest.mark.deep)]
)
@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ({"sharding": "grad_op"}, 3),
        ({"sharding": "hybrid", "hybrid_shard_size": 2}, 4),
        ({"activation_checkpointing": True}, 2),
        ({"activation_checkpointing": True, "sharding": "hybrid", "hybrid_shard_size": 2}, 4),
    ],
)
def test_it_trains_as_one_process_does_and_its_state_comes_back(
    ranks: Ranks, settings: dict[str, Any], world_size: int, cases: tuple[str, ...]
) -> None:
    alone, together = dict.fromkeys(cases), dict.fromkeys(cases, config(**settings))
    (expected,) = ranks(for_each, alone, trained_and_reloaded, world_size=1, process_group=False)
    found = ranks(for_each, together, trained_and_reloaded, world_size=world_size)
    for case, (losses, weights, _, state) in expected.items():
        for by_case in found:
            assert by_case[case][0] == pytest.approx(losses, abs=1e-5), case
            assert by_case[case][2] == [], case
        assert differences(found[0][case][1], weights, tolerance=1e-5, where=case) == []
        assert differences(found[0][case][3], state, tolerance=1e-5, where=case) == []


def test_one_infinite_element_in_the_shard_of_one_rank_makes_all_ranks_skip(ranks: Ranks) -> None:
    def work() -> list[Any]:
        run = Run("blocks", config(mixed_precision="fp16"))
        assert run.optimizer is not None
        scaler = parallel_core.grad_scaler(run.model)
        found: list[Any] = [scaler.is_enabled()]
        for spoiled in (False, True, False):
            before = run.local()
            inputs, targets = run.case.batch(seed=collective.rank())
            scaler.scale(run.case.loss(run.model(inputs), targets)).backward()
            gradient = run.model.get_parameter("blocks.1.up.weight").grad
            assert isinstance(gradient, DTensor)
            if spoiled and collective.rank() == 1:
                gradient.to_local()[0, 0] = float("inf")
            scale = scaler.get_scale()
            scaler.step(run.optimizer)
            scaler.update()
            run.optimizer.zero_grad()
            changed = {not torch.equal(before[name], value) for name, value in run.local().items()}
            found.append((changed, scaler.get_scale() < scale))
        return found

    assert ranks(work) == [[True, ({True}, False), ({False}, True), ({True}, False)]] * 2


@pytest.mark.parametrize("settings", [{}, {"mixed_precision": "bf16"}, {"reduce_precision": "fp16"}])
def test_the_scaler_is_enabled_where_anything_is_in_fp16(ranks: Ranks, settings: dict[str, Any]) -> None:
    def work() -> bool:
        return parallel_core.grad_scaler(Run("blocks", config(**settings)).model).is_enabled()

    assert ranks(work) == [settings.get("reduce_precision") == "fp16"] * 2


class AddsInPlace(nn.Module):
    """Changes in place what a unit has returned, which is a view where a linear layer gets more than two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.first(x)
        out += x
        return self.second(out)  # type: ignore[no-any-return]  # for a type checker, calling a module gives Any


def test_what_a_unit_returns_may_be_changed_in_place(ranks: Ranks) -> None:
    def work(wrap: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model: nn.Module = AddsInPlace()
        if wrap:
            model = parallel_core.wrap_model_for_training(model, config(auto_wrap_min_params=0)) or model
            assert isinstance(model.get_submodule("first"), FSDPModule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 3, 6)).square().sum().backward()
        optimizer.step()
        return parallel_core.model_state_dict(model)

    (expected,) = ranks(work, False, world_size=1, process_group=False)
    assert differences(ranks(work, True)[0], expected, tolerance=1e-6) == []
