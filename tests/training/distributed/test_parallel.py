"""A strategy named in a config, in one process: what is valid, and that the model then stays bare, on CPU and CUDA."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_core import (
    ConfigError,
    DistributedConfig,
    StrategyError,
    clip_grad_norm,
    data_parallel,
    grad_scaler,
    load_config,
    load_model_state_dict,
    load_optimizer_state_dict,
    model_state_dict,
    no_sync,
    optimizer_state_dict,
    process_group,
    wrap_model_for_training,
    wrap_optimizer,
)
from parallel_core.testing import Ranks

pytest.importorskip("parallel_core_ddp", reason="needs parallel-core-ddp, which is not installed")
pytest.importorskip("parallel_core_fsdp", reason="needs parallel-core-fsdp, which is not installed")
pytest.importorskip("parallel_core_fsdp2", reason="needs parallel-core-fsdp2, which is not installed")

STRATEGIES = ("ddp", "fsdp", "fsdp2")

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
on_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none"),
]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


# What a config may say


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_mixed_precision_is_one_of_three(precision: str) -> None:
    config = DistributedConfig(parallel_strategy="fsdp", fsdp_mixed_precision=precision)
    assert config.fsdp_mixed_precision == precision
    assert config.options.mixed_precision == precision  # type: ignore[attr-defined]  # fsdp's own struct has it


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ("bf61", "found 'bf61'; did you mean 'bf16'?"),
        ("FP32", "found 'FP32'; did you mean 'fp32'?"),
        ("float32", "found 'float32'; did you mean 'fp32'?"),
        ("int8", "found 'int8'"),
        ("", "found ''"),
        (None, "found None"),
        (16, "found 16"),
        (True, "found True"),
        (torch.bfloat16, "found torch.bfloat16"),
    ],
)
def test_another_mixed_precision_is_refused(found: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(parallel_strategy="fsdp", fsdp_mixed_precision=found)
    assert str(caught.value) == f"fsdp_mixed_precision: expected one of 'fp32', 'bf16' or 'fp16', {text}"


@pytest.mark.parametrize("number", [0, 1, 10_000_000, 10**12])
def test_the_smallest_unit_is_any_number_that_is_not_negative(number: int) -> None:
    assert DistributedConfig(fsdp_auto_wrap_min_params=number).fsdp_auto_wrap_min_params == number


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (-1, "found -1"),
        (-10_000_000, "found -10000000"),
        (1e7, "found 10000000.0; write 10_000_000"),
        (0.5, "found 0.5"),
        (True, "found True"),
        ("10_000_000", "found '10_000_000'; write 10_000_000, without quotes"),
        (None, "found None"),
    ],
)
def test_a_smallest_unit_that_is_no_such_number_is_refused(found: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(parallel_strategy="fsdp", fsdp_auto_wrap_min_params=found)
    assert str(caught.value) == f"fsdp_auto_wrap_min_params: expected an integer >= 0, {text}"


def test_both_are_refused_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DistributedConfig(fsdp_mixed_precision="bf", fsdp_auto_wrap_min_params=-1)
    assert len(caught.value.problems) == 2


def test_the_defaults_are_those_of_the_guide() -> None:
    config = DistributedConfig()
    assert config.parallel_strategy == "ddp"
    assert config.fsdp_mixed_precision == "bf16"
    assert config.fsdp_auto_wrap_min_params == 10_000_000
    assert config.fsdp_cpu_offload is False
    assert config.fsdp_sync_module_states is True
    assert config.ddp_gradient_as_bucket_view is True


def test_a_changed_copy_is_checked_as_well() -> None:
    with pytest.raises(ConfigError, match=r"^fsdp_auto_wrap_min_params: expected an integer >= 0, found -1$"):
        msgspec.structs.replace(DistributedConfig(), fsdp_auto_wrap_min_params=-1)


# In one process the model stays bare


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail on every attempt to use CUDA, whether there is one or not."""

    def touched(*arguments: object, **keywords: object) -> None:
        pytest.fail("CUDA was touched")

    for name in ("_lazy_init", "init", "set_device", "current_device", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, touched)
    monkeypatch.setattr(torch.accelerator, "set_device_index", touched)
    before = torch.cuda.is_initialized()
    yield
    assert torch.cuda.is_initialized() == before


def state_of(model: nn.Module) -> list[object]:
    """Return what a wrap could have changed of a model."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [
        [(name, type(module), sorted(vars(module))) for name, module in model.named_modules()],
        [(name, id(tensor), tensor.device, tensor.dtype, tensor._version) for name, tensor in tensors],
        [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()],
    ]


@each_strategy
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
@pytest.mark.usefixtures("without_cuda")
def test_on_the_cpu_without_a_process_group_the_answer_is_none(strategy: str, device: Any) -> None:
    assert not dist.is_initialized()
    model = model_of()
    before = state_of(model)
    assert wrap_model_for_training(model, DistributedConfig(parallel_strategy=strategy), device=device) is None
    assert state_of(model) == before
    assert not dist.is_initialized()


@each_strategy
@pytest.mark.parametrize("backend", ["auto", "gloo", "nccl"])
@pytest.mark.usefixtures("without_cuda")
def test_the_backend_plays_no_part_in_that(strategy: str, backend: str) -> None:
    config = DistributedConfig(parallel_strategy=strategy, backend=backend)
    assert wrap_model_for_training(model_of(), config, device="cpu") is None


@each_strategy
def test_in_a_world_of_one_with_a_process_group_the_answer_is_none(ranks: Ranks, strategy: str) -> None:
    def work() -> tuple[bool, int]:
        config = DistributedConfig(parallel_strategy=strategy)
        return wrap_model_for_training(model_of(), config) is None, dist.get_world_size()

    assert ranks(work, world_size=1) == [(True, 1)]


@each_strategy
def test_with_two_ranks_on_the_cpu_the_model_is_wrapped(ranks: Ranks, strategy: str) -> None:
    def work() -> str:
        config = DistributedConfig(parallel_strategy=strategy, fsdp_auto_wrap_min_params=0)
        return type(wrap_model_for_training(model_of(), config)).__name__

    wrapper = {"ddp": "DistributedDataParallel", "fsdp": "FullyShardedDataParallel", "fsdp2": "FSDPSequential"}[
        strategy
    ]
    assert ranks(work) == [wrapper] * 2


def test_a_strategy_that_is_not_installed_is_an_error_even_so() -> None:
    with pytest.raises(ConfigError, match="parallel_strategy: unknown strategy 'zero'"):
        DistributedConfig(parallel_strategy="zero")


@pytest.mark.usefixtures("only_fakes")
def test_the_default_strategy_that_is_not_installed_is_an_error_at_the_wrap() -> None:
    with pytest.raises(StrategyError, match=r"^unknown strategy 'ddp': no strategy is installed"):
        wrap_model_for_training(model_of(), load_config(environ={}))


def logged(caplog: pytest.LogCaptureFixture, **settings: Any) -> list[tuple[str, str]]:
    with caplog.at_level(logging.INFO, "parallel_core"):
        assert wrap_model_for_training(model_of(), DistributedConfig(**settings), device="cpu") is None
    return [(record.levelname, record.getMessage()) for record in caplog.records]


@each_strategy
def test_that_the_model_stays_bare_is_said_at_info(caplog: pytest.LogCaptureFixture, strategy: str) -> None:
    (level, message), *_ = logged(caplog, parallel_strategy=strategy)
    version = f"parallel-core-{strategy} 0.1.0"
    assert (level, message) == (
        "INFO",
        f"strategy '{strategy}' ({version}) does not apply to 1 rank(s) on cpu: the model stays bare",
    )


@pytest.mark.parametrize(
    ("settings", "listed"),
    [
        ({}, "fsdp_mixed_precision='bf16'"),
        ({"fsdp_mixed_precision": "fp16"}, "fsdp_mixed_precision='fp16'"),
        ({"fsdp_cpu_offload": True}, "fsdp_mixed_precision='bf16', fsdp_cpu_offload=True"),
        ({"fsdp_mixed_precision": "fp32", "fsdp_cpu_offload": True}, "fsdp_cpu_offload=True"),
    ],
)
def test_settings_that_are_then_not_in_effect_are_listed_in_a_warning(
    caplog: pytest.LogCaptureFixture, settings: dict[str, Any], listed: str
) -> None:
    warnings = [text for level, text in logged(caplog, parallel_strategy="fsdp", **settings) if level == "WARNING"]
    assert warnings == [f"not in effect, because strategy 'fsdp' does not apply here: {listed}"]


@pytest.mark.parametrize(
    "settings",
    [
        {"parallel_strategy": "ddp"},
        {"parallel_strategy": "ddp", "ddp_static_graph": True, "fsdp_cpu_offload": True},
        {"parallel_strategy": "fsdp", "fsdp_mixed_precision": "fp32", "fsdp_auto_wrap_min_params": 1},
    ],
)
def test_where_nothing_is_lost_there_is_no_warning(caplog: pytest.LogCaptureFixture, settings: dict[str, Any]) -> None:
    assert [level for level, _ in logged(caplog, **settings)] == ["INFO"]


def train(config: DistributedConfig, steps: int = 3) -> dict[str, Tensor]:
    """Train as a script does, in which nothing names a strategy."""
    with process_group(config) as group:
        model = model_of()
        model = wrap_model_for_training(model, config, device=group.device) or model.to(group.device)  # type: ignore[assignment]  # as users do
        optimizer = wrap_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        scaler = grad_scaler(model)
        assert data_parallel(model) == (0, 1)
        batches = torch.randn(steps, 2, 5, 4, generator=torch.Generator().manual_seed(1)).to(group.device)
        for first, second in batches:
            with no_sync(model):
                scaler.scale(model(first).square().mean() / 2).backward()
            scaler.scale(model(second).square().mean() / 2).backward()
            scaler.unscale_(optimizer)
            clip_grad_norm(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        weights, state = model_state_dict(model), optimizer_state_dict(model, optimizer)
        load_model_state_dict(model, weights)
        load_optimizer_state_dict(model, optimizer, state)
        return weights


def by_hand(steps: int = 3) -> dict[str, Tensor]:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for first, second in torch.randn(steps, 2, 5, 4, generator=torch.Generator().manual_seed(1)):
        (model(first).square().mean() / 2).backward()
        (model(second).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@each_strategy
def test_one_process_trains_as_plain_torch_does_bit_for_bit(strategy: str) -> None:
    initialized = torch.cuda.is_initialized()
    found = train(DistributedConfig(parallel_strategy=strategy, backend="gloo"))
    expected = by_hand()
    assert torch.cuda.is_initialized() == initialized
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# The same on CUDA


def params_on_cuda(*values: Any) -> Callable[..., Any]:
    return pytest.mark.parametrize("device", [pytest.param(value, marks=on_cuda) for value in values])


@each_strategy
@params_on_cuda(None, "cuda", torch.device("cuda", 0))
def test_on_cuda_without_a_process_group_the_answer_is_none_and_the_model_stays_where_it_was(
    strategy: str, device: Any
) -> None:
    model = model_of()
    before = state_of(model)
    assert wrap_model_for_training(model, DistributedConfig(parallel_strategy=strategy), device=device) is None
    assert state_of(model) == before


@each_strategy
@params_on_cuda(None, "cuda")
@pytest.mark.usefixtures("without_cuda")
def test_to_decline_on_cuda_it_is_not_touched(strategy: str, device: Any) -> None:
    config = DistributedConfig(parallel_strategy=strategy, fsdp_cpu_offload=True)
    assert wrap_model_for_training(model_of(), config, device=device) is None


@each_strategy
@params_on_cuda(None)
def test_one_process_trains_on_cuda_as_on_the_cpu(strategy: str, device: Any) -> None:
    found = train(DistributedConfig(parallel_strategy=strategy))
    for name, expected in by_hand().items():
        assert found[name].device.type == "cpu"
        torch.testing.assert_close(found[name], expected, rtol=1e-4, atol=1e-4)


@each_strategy
@params_on_cuda(None)
def test_on_cuda_a_launchers_world_of_one_declines_as_well(
    monkeypatch: pytest.MonkeyPatch, strategy: str, device: Any
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "0")
    config = DistributedConfig(parallel_strategy=strategy)
    with process_group(config) as group:
        assert group.device == torch.device("cuda", 0)
        assert wrap_model_for_training(model_of(), config, device=group.device) is None
    assert not dist.is_initialized()
