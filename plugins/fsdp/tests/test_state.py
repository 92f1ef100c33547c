"""What fsdp's state dicts cost, and how they differ from torch's own."""

from __future__ import annotations

import resource
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import parallel_core
from parallel_core import DistributedConfig, StateDictError
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.models import CASES

MIB = 2**20


def wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    config = DistributedConfig(parallel_strategy="fsdp", fsdp_mixed_precision="fp32", **settings)
    answer = parallel_core.wrap_model_for_training(model, config)
    assert answer is not None
    return answer


def test_a_full_dict_costs_the_other_ranks_no_more_than_two_units(ranks: Ranks) -> None:
    def work() -> list[float]:
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(16)])  # 64 MiB in units of 4 MiB
        result = wrapped(model, fsdp_auto_wrap_min_params=1024 * 1024)
        result(torch.ones(1, 1024))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        saved = parallel_core.model_state_dict(result)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        return [grown, sum(value.nbytes for value in saved.values()) / MIB]

    (first, whole), (second, nothing) = ranks(work)
    assert (whole, nothing) == (64, 0)
    assert first < 64 + 6 * 4
    assert second < 24


def test_sharded_entries_are_dtensors_cut_by_rows(ranks: Ranks) -> None:
    def work() -> list[Any]:
        result = wrapped(CASES["buffers"].build(), fsdp_auto_wrap_min_params=0)
        found = parallel_core.model_state_dict(result, "sharded")
        weight, mask = found["layer.weight"], found["mask"]
        assert isinstance(weight, DTensor)
        return [weight.placements == (Shard(0),), tuple(weight.shape), tuple(weight.to_local().shape), type(mask)]

    assert ranks(work, world_size=3) == [[True, (6, 6), (2, 6), torch.Tensor]] * 3


def test_a_rank_that_holds_nothing_of_a_parameter_saves_and_loads_like_any_other(ranks: Ranks) -> None:
    expected = CASES["small_parameters"].build(seed=3).state_dict()

    def work() -> dict[str, Any]:
        result = wrapped(CASES["small_parameters"].build(), fsdp_auto_wrap_min_params=0)
        parallel_core.load_model_state_dict(result, expected)
        return parallel_core.model_state_dict(result)

    found = ranks(work, world_size=5)[0]
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_state_that_is_not_shaped_like_its_parameter_is_refused_by_name(ranks: Ranks) -> None:
    def work() -> str:
        result = wrapped(CASES["blocks"].build(), fsdp_auto_wrap_min_params=50)
        optimizer = torch.optim.SGD(result.parameters(), lr=0.1)
        parameter = next(parameter for parameter in result.parameters() if parameter.numel())
        optimizer.state[parameter]["row"] = torch.ones(3, 2)
        try:
            parallel_core.optimizer_state_dict(result, optimizer)
        except StateDictError as error:
            return str(error)
        return "no error"

    messages = ranks(work)
    assert messages[0] == messages[1]
    assert "'row' of 'blocks.0." in messages[0]


def test_a_parameter_frozen_after_training_keeps_its_optimizer_state(ranks: Ranks) -> None:
    def work() -> list[Any]:
        result = wrapped(CASES["blocks"].build(), fsdp_auto_wrap_min_params=50)
        optimizer = torch.optim.AdamW(result.parameters(), lr=0.1)
        inputs, targets = CASES["blocks"].batch(seed=0)
        CASES["blocks"].loss(result(inputs), targets).backward()
        optimizer.step()
        for parameter in list(result.parameters())[:2]:
            parameter.requires_grad_(False)
        saved = parallel_core.optimizer_state_dict(result, optimizer)
        fresh = torch.optim.AdamW(result.parameters(), lr=0.1)
        parallel_core.load_optimizer_state_dict(result, fresh, saved)
        again = parallel_core.optimizer_state_dict(result, fresh)
        return [list(saved.get("state", {})), list(again.get("state", {})), collective.rank()]

    names = [name for name, _ in CASES["blocks"].build().named_parameters()]
    assert ranks(work) == [[names, names, 0], [[], [], 1]]


def test_optimizer_state_that_a_rank_lacks_of_its_part_is_told_of(ranks: Ranks) -> None:
    def work() -> str:
        result = wrapped(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), fsdp_auto_wrap_min_params=20)
        optimizer = torch.optim.AdamW(result.parameters(), lr=0.1)
        result(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if collective.rank() == 1:
            optimizer.state.clear()
        try:
            parallel_core.optimizer_state_dict(result, optimizer)
        except StateDictError as error:
            return str(error)
        return "no error"

    told = (
        "the optimizer's state of '0.weight' is ['exp_avg', 'exp_avg_sq', 'step'] on rank 0, [] on rank 1, and each "
        "has a part of that parameter; take the same steps on every rank"
    )
    assert ranks(work) == [told, told]
