"""What fsdp makes of its settings: units, precision, initial values, and what it refuses."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import parallel_core
from parallel_core import DistributedConfig, WrapError
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.models import CASES


def wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    config = DistributedConfig(parallel_strategy="fsdp", **settings)
    answer = parallel_core.wrap_model_for_training(model, config)
    assert answer is not None
    return answer


class Block(nn.Module):
    """10.5 million parameters: above the default threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(1024, 5120)
        self.down = nn.Linear(5120, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(1024, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def test_by_default_each_large_block_is_a_unit_and_a_rank_holds_half(ranks: Ranks) -> None:
    def work() -> list[Any]:
        model = Stack()
        total = sum(parameter.numel() for parameter in model.parameters())
        result = wrapped(model)
        units = [
            name.replace("_fsdp_wrapped_module", "").strip(".")
            for name, module in result.named_modules()
            if isinstance(module, FullyShardedDataParallel)
        ]
        held = sum(parameter.numel() for parameter in result.parameters())
        return [units, total, held]

    first, second = ranks(work)
    assert first[0] == second[0]
    assert len(first[0]) == 3  # the root and two blocks
    assert first[2] + second[2] == first[1]
    for _, total, held in (first, second):
        assert abs(held - total / 2) <= 3 * 2  # each of the three units is padded to an even length


def test_a_threshold_that_nothing_meets_warns_with_the_value_that_would_do(ranks: Ranks) -> None:
    def work() -> list[str]:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]  # to catch it
        logger = logging.getLogger("parallel_core_fsdp")
        logger.addHandler(handler)
        try:
            wrapped(CASES["blocks"].build(), fsdp_auto_wrap_min_params=100_000_000)
            wrapped(CASES["blocks"].build(), fsdp_auto_wrap_min_params=168)
            wrapped(nn.Sequential(nn.Tanh()))  # nothing to save
        finally:
            logger.removeHandler(handler)
        return messages

    expected = (
        "fsdp_auto_wrap_min_params = 100_000_000: no module has as many parameters, so the root holds them all and no "
        "memory is saved; the largest modules are 'blocks.0' (168), 'blocks.1' (168), 'blocks.0.up' (84): set "
        "fsdp_auto_wrap_min_params = 168 or less"
    )
    assert ranks(work) == [[expected], []]


def test_rank_0_alone_logs_the_report_and_every_rank_has_the_same(ranks: Ranks) -> None:
    def work() -> list[Any]:
        seen: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: seen.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]  # to catch it
        logger = logging.getLogger("parallel_core")
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            model = wrapped(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)), fsdp_auto_wrap_min_params=50)
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
        return [seen, parallel_core.wrap_report(model)]

    (seen, report), (nothing, same) = ranks(work)
    assert nothing == []
    assert seen == [f"INFO {report}"]
    assert report == same
    assert report.held == (36 * 4 + 5 * 4,) * 2  # halves of 72 elements in a unit, and of 9, padded to 10, in the root


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", None)])
def test_mixed_precision_computes_in_its_dtype_and_saves_in_the_models(
    ranks: Ranks, name: str, dtype: torch.dtype | None
) -> None:
    def work() -> list[Any]:
        model = CASES["blocks"].build()
        seen: set[torch.dtype] = set()
        model.get_submodule("blocks.1.up").register_forward_hook(lambda module, args, output: seen.add(output.dtype))
        result = wrapped(model, fsdp_mixed_precision=name, fsdp_auto_wrap_min_params=50)
        assert isinstance(result, FullyShardedDataParallel)
        optimizer = parallel_core.wrap_optimizer(result, torch.optim.AdamW(result.parameters(), lr=1e-2))
        scaler = parallel_core.grad_scaler(result)
        losses = []
        for _ in range(8):
            inputs, targets = CASES["blocks"].batch(seed=0)
            loss = CASES["blocks"].loss(result(inputs), targets)
            losses.append(loss.item())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        saved = parallel_core.model_state_dict(result)
        return [
            seen,
            result.mixed_precision.reduce_dtype,
            scaler.is_enabled(),
            losses[-1] < losses[0],
            {value.dtype for value in saved.values()} | {torch.float32},
        ]

    expected = [{dtype or torch.float32}, dtype, name == "fp16", True, {torch.float32}]
    assert ranks(work) == [expected, expected]


def test_batch_norm_trains_in_bf16_and_keeps_its_statistics_in_fp32(ranks: Ranks) -> None:
    def work() -> dict[str, Any]:
        result = wrapped(CASES["batch_norm"].build(), fsdp_mixed_precision="bf16", fsdp_auto_wrap_min_params=20)
        inputs, targets = CASES["batch_norm"].batch(seed=0)
        CASES["batch_norm"].loss(result(inputs), targets).backward()
        saved = parallel_core.model_state_dict(result)
        return {name: (value.dtype, value.abs().sum().item() > 0) for name, value in saved.items()}

    dtypes = {name: value.dtype for name, value in CASES["batch_norm"].build().state_dict().items()}
    found, _ = ranks(work)
    assert {name: dtype for name, (dtype, _) in found.items()} == dtypes
    assert found["1.running_mean"][1]


def test_fp16_overflow_on_one_rank_is_skipped_on_all(ranks: Ranks) -> None:
    def work() -> list[bool]:
        result = wrapped(CASES["blocks"].build(), fsdp_mixed_precision="fp16", fsdp_auto_wrap_min_params=50)
        optimizer = parallel_core.wrap_optimizer(result, torch.optim.SGD(result.parameters(), lr=1e-2))
        scaler = parallel_core.grad_scaler(result)
        before = [parameter.clone() for parameter in result.parameters()]
        inputs, targets = CASES["blocks"].batch(seed=0)
        loss = CASES["blocks"].loss(result(inputs), targets)
        scaler.scale(loss * (float("inf") if collective.rank() == 0 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        return [torch.equal(old, new) for old, new in zip(before, result.parameters(), strict=True)]

    assert all(all(unchanged) for unchanged in ranks(work))


def test_initial_values_are_compared_where_they_are_not_taken_from_rank_0(ranks: Ranks) -> None:
    def work(same: bool) -> list[Any]:
        model = CASES["blocks"].build(seed=0 if same else collective.rank())
        before = {name: value.clone() for name, value in model.state_dict().items()}
        try:
            wrapped(model, fsdp_sync_module_states=False)
        except WrapError as error:
            unchanged = all(torch.equal(before[name], value) for name, value in model.state_dict().items())
            return [str(error), unchanged, any(isinstance(m, FullyShardedDataParallel) for m in model.modules())]
        return ["no error"]

    assert ranks(work, True) == [["no error"], ["no error"]]
    message = (
        "initial values differ between ranks, first those of 'blocks.0.up.weight' (6 of 10 tensors); seed all "
        "ranks alike, or set fsdp_sync_module_states = true"
    )
    assert ranks(work, False) == [[message, True, False], [message, True, False]]


def test_cpu_offload_without_an_accelerator_is_refused(ranks: Ranks) -> None:
    def work() -> list[Any]:
        model = CASES["blocks"].build()
        try:
            wrapped(model, fsdp_cpu_offload=True)
        except WrapError as error:
            return [str(error), any(isinstance(m, FullyShardedDataParallel) for m in model.modules())]
        return ["no error"]

    message = (
        "strategy 'fsdp' can't wrap this model: fsdp_cpu_offload keeps parameters on the CPU while an accelerator "
        "computes, and this rank trains on cpu; set fsdp_cpu_offload = false"
    )
    assert ranks(work) == [[message, False], [message, False]]


def test_a_wrapped_module_inside_an_integer_parameter_and_mixed_dtypes_are_named(ranks: Ranks) -> None:
    def work() -> list[str]:
        nested = nn.Sequential(
            FullyShardedDataParallel(nn.Linear(6, 6), device_id=torch.device("cpu")), nn.Linear(6, 6)
        )
        integers = nn.Linear(6, 6)
        integers.register_parameter("steps", nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False))
        messages = []
        for model in (nested, integers, CASES["mixed_dtypes"].build()):
            try:
                wrapped(model)
            except WrapError as error:
                messages.append(str(error).removeprefix("strategy 'fsdp' can't wrap this model: "))
        return messages

    root = (
        "the root unit has parameters of {}, and fsdp handles one dtype at a time; convert the model to one, or make a "
        "unit of each part with fsdp_wrap_layers"
    )
    integer = "parameter 'steps' has dtype int64, and fsdp shards floating point only; make it a buffer; "
    expected = [
        "'0' is a FullyShardedDataParallel already; pass the bare model",
        integer + root.format("float32 ('weight') and int64 ('steps')"),
        root.format("float32 ('wide.weight') and bfloat16 ('narrow.weight')"),
    ]
    assert ranks(work) == [expected, expected]


def test_an_attention_is_one_unit_or_none_whatever_the_threshold(ranks: Ranks) -> None:
    def work() -> list[str]:
        result = wrapped(CASES["attention"].build(), fsdp_auto_wrap_min_params=0)
        result(CASES["attention"].batch(seed=0)[0]).sum().backward()
        modules = result.named_modules()
        names = [
            name.replace("_fsdp_wrapped_module", "") for name, m in modules if isinstance(m, FullyShardedDataParallel)
        ]
        return [".".join(filter(None, name.split("."))) for name in names]

    assert ranks(work) == [["", "attention", "out"]] * 2


class InPlace(nn.Module):
    """Changes what a unit returns in place: a view, as a linear layer makes it of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y += x
        out: torch.Tensor = self.second(y)
        return out


def test_what_a_unit_returns_may_be_changed_in_place(ranks: Ranks) -> None:
    def gradient_norm(is_wrapped: bool) -> float:
        torch.manual_seed(0)
        model: nn.Module = InPlace()
        if is_wrapped:
            options = {"fsdp_mixed_precision": "fp32", "fsdp_auto_wrap_min_params": 0}
            config = DistributedConfig(parallel_strategy="fsdp", **options)
            model = parallel_core.wrap_model_for_training(model, config) or model
        model(torch.ones(2, 3, 4)).square().mean().backward()
        return parallel_core.clip_grad_norm(model, 1e9).item()

    for wrapped, bare in ranks(lambda: (gradient_norm(True), gradient_norm(False))):
        assert wrapped == pytest.approx(bare, abs=1e-6)


def test_a_parameter_without_elements_is_refused_by_name(ranks: Ranks) -> None:
    def work() -> str:
        model = InPlace()
        model.register_parameter("nothing", nn.Parameter(torch.empty(0, 3)))
        try:
            parallel_core.wrap_model_for_training(model, DistributedConfig(parallel_strategy="fsdp"))
        except WrapError as error:
            return f"{error}; {type(model.first).__name__}"
        return "no error"

    for message in ranks(work):
        assert "parameter 'nothing' has no elements" in message
        assert message.endswith("; Linear")


def test_a_forward_that_was_replaced_may_know_its_own_module(ranks: Ranks) -> None:
    def work() -> bool:
        model = nn.Sequential(InPlace(), nn.Linear(4, 4))
        forward = model[0].forward
        vars(model[0])["forward"] = lambda x: forward(x) * 2
        result = wrapped(model, fsdp_auto_wrap_min_params=40)
        return bool(result(torch.ones(2, 4)).isfinite().all())

    assert ranks(work) == [True, True]


class Listed(InPlace):
    """Keeps its first layer in a list beside the attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.first]


def test_a_unit_that_a_module_keeps_elsewhere_too_is_refused(ranks: Ranks) -> None:
    def work() -> str:
        with pytest.raises(WrapError) as caught:
            wrapped(nn.Sequential(Listed()), fsdp_auto_wrap_min_params=1)
        wrapped(Listed(), fsdp_auto_wrap_min_params=100)  # where it is no unit, nothing takes its place
        return str(caught.value).removeprefix("strategy 'fsdp' can't wrap this model: ")

    expected = (
        "'0' keeps the module '0.first' in its attribute 'layers' too, where fsdp can't put the wrapped one; reach it "
        "through its parent, or use nn.ModuleList"
    )
    assert ranks(work) == [expected, expected]


def test_a_parameter_of_another_wrapped_model_is_refused(ranks: Ranks) -> None:
    def work() -> str:
        shared = nn.Linear(4, 4)
        wrapped(nn.Sequential(shared, nn.Linear(4, 1)))
        other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        other[0].weight = shared.weight
        with pytest.raises(WrapError) as caught:
            wrapped(other)
        return str(caught.value).removeprefix("strategy 'fsdp' can't wrap this model: ")

    told = "'0.weight' is in shards already, as a part of another wrapped model; build a bare model with its own"
    assert all(told in found for found in ranks(work))


def test_the_cpu_may_be_named_with_an_index(ranks: Ranks) -> None:
    def work() -> bool:
        config = DistributedConfig(parallel_strategy="fsdp")
        model = parallel_core.wrap_model_for_training(nn.Linear(2, 2), config, device="cpu:0")
        assert model is not None
        return bool(model(torch.ones(1, 2)).isfinite().all())

    assert ranks(work) == [True, True]


class Adding(nn.Sequential):
    """Puts a value of its own into its state dict."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {**super().state_dict(*args, **kwargs), "epoch": 3}


def test_what_a_state_dict_has_besides_the_parts_of_modules_is_refused(ranks: Ranks) -> None:
    def work() -> str:
        with pytest.raises(WrapError) as caught:
            wrapped(Adding(nn.Linear(2, 2)))
        return str(caught.value)

    told = "the state dict of the model has 'epoch', which is no parameter, no buffer and no extra state of a module"
    assert all(told in found for found in ranks(work))


def test_units_that_differ_between_ranks_are_refused(ranks: Ranks) -> None:
    def work() -> str:
        inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        outer = Listed()
        outer.layers = []
        outer.inner = inner if collective.rank() == 0 else nn.ModuleList(inner)
        with pytest.raises(WrapError) as caught:
            wrapped(nn.Sequential(outer, nn.Linear(4, 4)), fsdp_auto_wrap_min_params=12)
        return str(caught.value)

    first, second = ranks(work)
    assert first == second
    assert first.startswith("the ranks do not agree: '0.inner' is a unit on rank 0, and none on rank 1")
