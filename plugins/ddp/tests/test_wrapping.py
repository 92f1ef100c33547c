"""Every setting of ddp changes what it says it changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import parallel_core
from parallel_core import ConfigError, DistributedConfig, WrapError
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.models import CASES


def wrapped(case: str, **settings: Any) -> nn.Module:
    config = DistributedConfig(parallel_strategy="ddp", **settings)
    model = parallel_core.wrap_model_for_training(CASES[case].build(), config)
    assert model is not None
    return model


def test_settings_reach_distributed_data_parallel(ranks: Ranks) -> None:
    def work() -> list[Any]:
        plain = wrapped("blocks")
        other = wrapped(
            "blocks",
            ddp_gradient_as_bucket_view=False,
            ddp_static_graph=True,
            ddp_bucket_cap_mb=1.5,
            ddp_broadcast_buffers=False,
        )
        return [
            (
                model.gradient_as_bucket_view,
                model.static_graph,
                model.bucket_bytes_cap,
                model.forward_sync_buffers,
            )
            for model in (plain, other)
            if isinstance(model, DistributedDataParallel)
        ]

    default = (True, False, 25 * 2**20, True)
    changed = (False, True, int(1.5 * 2**20), False)
    assert ranks(work) == [[default, changed], [default, changed]]


def test_an_unused_parameter_needs_its_flag(ranks: Ranks) -> None:
    def work(find: bool) -> str:
        model = wrapped("unused_parameter", ddp_find_unused_parameters=find)
        inputs, _ = CASES["unused_parameter"].batch(seed=0)
        try:
            for _ in range(3):
                model(inputs).sum().backward()
        except RuntimeError as error:
            return str(error)
        return "no error"

    assert ranks(work, True) == ["no error", "no error"]
    assert all("find_unused_parameters=True" in message for message in ranks(work, False))


@pytest.mark.parametrize("broadcast", [True, False])
def test_buffers_follow_rank_0_only_if_broadcast(ranks: Ranks, broadcast: bool) -> None:
    def work() -> float:
        model = wrapped("batch_norm", ddp_broadcast_buffers=broadcast)
        inputs, _ = CASES["batch_norm"].batch(seed=collective.rank())
        model(inputs)  # each rank's statistics become its own
        model(torch.zeros_like(inputs))
        return float(dict(model.named_buffers())["module.1.running_mean"].sum())

    first, second = ranks(work)
    assert (first == second) is broadcast


def test_a_model_without_gradients_passes_through(ranks: Ranks) -> None:
    def work() -> list[Any]:
        model = CASES["frozen"].build(seed=collective.rank())
        answer = parallel_core.wrap_model_for_training(model, DistributedConfig(parallel_strategy="ddp"))
        with parallel_core.no_sync(model):
            return [answer is model, model.state_dict()["0.weight"].sum().item()]

    expected = CASES["frozen"].build(seed=0).state_dict()["0.weight"].sum().item()
    assert ranks(work) == [[True, expected], [True, expected]]


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint32, torch.float8_e4m3fn])
def test_what_gloo_can_t_send_is_refused_by_name(ranks: Ranks, dtype: torch.dtype) -> None:
    """`torch.nn.parallel.DistributedDataParallel` fails half way through its construction there."""

    def work() -> str:
        model = nn.Linear(2, 2)
        model.register_buffer("odd", torch.zeros(2, dtype=dtype))
        with pytest.raises(WrapError) as caught:
            parallel_core.wrap_model_for_training(model, DistributedConfig(parallel_strategy="ddp"))
        return str(caught.value)

    expected = (
        f"strategy 'ddp' can't wrap this model: 'odd' is {str(dtype).removeprefix('torch.')}, which "
        f"DistributedDataParallel can't send over gloo; use another dtype, or train on a GPU"
    )
    assert ranks(work) == [expected, expected]


def test_a_static_graph_and_a_search_for_unused_parameters_exclude_each_other() -> None:
    message = "ddp: find_unused_parameters is in vain with static_graph, which finds them in the first step; set one"
    with pytest.raises(ConfigError, match=message):
        DistributedConfig(ddp_static_graph=True, ddp_find_unused_parameters=True)


class TooLarge(nn.Linear):
    """Finds no memory on rank 1."""

    def _apply(self, *arguments: Any, **options: Any) -> nn.Module:
        if collective.rank() == 1:
            raise MemoryError("full")
        return super()._apply(*arguments, **options)  # type: ignore[no-any-return, no-untyped-call]


def test_a_move_that_fails_on_one_rank_is_one_error_on_every_rank(ranks: Ranks) -> None:
    def work() -> str:
        with pytest.raises(WrapError) as caught:
            parallel_core.wrap_model_for_training(TooLarge(2, 2), DistributedConfig(parallel_strategy="ddp"))
        return str(caught.value)

    assert ranks(work) == ["rank 1 of 2: MemoryError: full"] * 2


def test_tensors_that_can_t_be_sent_and_a_bucket_that_no_machine_has_are_refused(ranks: Ranks) -> None:
    def work() -> list[str]:
        sparse, trained = nn.Linear(2, 2), nn.Linear(2, 2)
        sparse.register_buffer("near", torch.eye(2).to_sparse())
        trained(torch.ones(1, 2)).sum().backward()
        messages = []
        for model in (sparse, trained):
            with pytest.raises(WrapError) as caught:
                parallel_core.wrap_model_for_training(model, DistributedConfig(parallel_strategy="ddp"))
            messages.append(str(caught.value).removeprefix("strategy 'ddp' can't wrap this model: ")[:40])
        return messages

    assert ranks(work) == [["buffer 'near' is sparse (torch.sparse_co", "parameter 'weight' has a gradient alread"]] * 2
    with pytest.raises(ConfigError, match="expected a number > 0 and <= 1_000_000 or null"):
        DistributedConfig(ddp_bucket_cap_mb=1e300)


def test_parameters_in_one_memory_are_refused_where_the_wrap_moves_them() -> None:
    from parallel_core_ddp import check_model

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    assert check_model(model, torch.device("cpu")) == []  # they stay together
    (found,) = check_model(model, torch.device("cuda"))
    assert found.startswith("parameter '0.weight' and parameter '1.weight' lie in the same memory")
