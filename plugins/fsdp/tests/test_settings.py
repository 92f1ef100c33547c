"""What the settings that fsdp shares with other strategies come to on the wrapped model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

import parallel_core
from parallel_core import ConfigError, DistributedConfig, TrainingError, WrapError
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import Run, differences, for_each, trained_and_reloaded
from parallel_core.testing.models import CASES


def config(**settings: Any) -> DistributedConfig:
    named = {"mixed_precision": "fp32", "auto_wrap_min_params": 50, **settings}
    return DistributedConfig(parallel_strategy="fsdp", **{f"fsdp_{name}": value for name, value in named.items()})


def wrapped(model: nn.Module, **settings: Any) -> FullyShardedDataParallel:
    answer = parallel_core.wrap_model_for_training(model, config(**settings))
    assert isinstance(answer, FullyShardedDataParallel)
    return answer


def units_of(model: nn.Module) -> list[str]:
    """Return the bare names of the units."""
    added = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    names = [name for name, module in model.named_modules() if isinstance(module, FullyShardedDataParallel)]
    return [".".join(part for part in name.split(".") if part not in ("", *added)) for name in names]


def test_each_module_of_a_class_that_is_named_is_a_unit_whole(ranks: Ranks) -> None:
    def work() -> list[str]:
        return units_of(wrapped(CASES["blocks"].build(), wrap_layers=("Residual",), auto_wrap_min_params=0))

    assert ranks(work) == [["", "blocks.0", "blocks.1"]] * 2


@pytest.mark.parametrize(
    ("settings", "strategy", "shape", "world_size"),
    [
        ({}, ShardingStrategy.FULL_SHARD, (2,), 2),
        ({"sharding": "grad_op"}, ShardingStrategy.SHARD_GRAD_OP, (2,), 2),
        ({"sharding": "hybrid", "hybrid_shard_size": 2}, ShardingStrategy.HYBRID_SHARD, (2, 2), 4),
    ],
)
def test_sharding_reaches_every_unit(
    ranks: Ranks, settings: dict[str, Any], strategy: ShardingStrategy, shape: tuple[int, ...], world_size: int
) -> None:
    def work() -> list[Any]:
        model = wrapped(CASES["blocks"].build(), **settings)
        strategies = {unit.sharding_strategy for unit in FullyShardedDataParallel.fsdp_modules(model)}
        mesh: Any = model._device_mesh
        held = sum(parameter.numel() for parameter in model.parameters())
        return [strategies, tuple(mesh.shape), held < 200, parallel_core.data_parallel(model)]

    # The model has 336 parameters; of them a rank holds half, the other half being the next rank's.
    assert ranks(work, world_size=world_size) == [
        [{strategy}, shape, True, (rank, world_size)] for rank in range(world_size)
    ]


@pytest.mark.parametrize(
    ("settings", "computed", "reduced"),
    [
        ({"mixed_precision": "bf16"}, torch.bfloat16, torch.bfloat16),
        ({"mixed_precision": "bf16", "reduce_precision": "fp32"}, torch.bfloat16, torch.float32),
        ({"mixed_precision": "fp32", "reduce_precision": "bf16"}, torch.float32, torch.bfloat16),
    ],
)
def test_it_computes_in_one_dtype_and_reduces_in_another(
    ranks: Ranks, settings: dict[str, Any], computed: torch.dtype, reduced: torch.dtype
) -> None:
    def work() -> list[Any]:
        model, seen = CASES["blocks"].build(), set()
        model.get_submodule("blocks.1.up").register_forward_hook(lambda module, args, output: seen.add(output.dtype))
        result = wrapped(model, **settings)
        inputs, targets = CASES["blocks"].batch(seed=0)
        CASES["blocks"].loss(result(inputs), targets).backward()
        reductions = {unit.mixed_precision.reduce_dtype for unit in FullyShardedDataParallel.fsdp_modules(result)}
        grads = {parameter.grad.dtype for parameter in result.parameters() if parameter.grad is not None}
        return [seen, reductions, grads]

    assert ranks(work) == [[{computed}, {reduced}, {torch.float32}]] * 2


def test_with_checkpointing_each_unit_is_computed_twice_and_names_stay_bare(ranks: Ranks) -> None:
    def work(on: bool) -> list[Any]:
        calls: list[int] = []
        model = CASES["own_names"].build()
        model.get_submodule("module._fsdp_wrapped_module.up").register_forward_hook(lambda *_: calls.append(1))
        result = wrapped(model, wrap_layers=("Residual",), auto_wrap_min_params=10**6, activation_checkpointing=on)
        wrappers = sum(isinstance(module, CheckpointWrapper) for module in result.modules())
        inputs, targets = CASES["own_names"].batch(seed=0)
        CASES["own_names"].loss(result(inputs), targets).backward()
        names = list(parallel_core.model_state_dict(result, "sharded"))
        return [len(calls), wrappers, names == list(CASES["own_names"].build().state_dict())]

    assert ranks(work, False) == [[1, 0, True]] * 2
    assert ranks(work, True) == [[2, 1, True]] * 2


@pytest.mark.parametrize(
    "cases", [("blocks", "language_model"), pytest.param(("small_parameters", "adapter"), marks=pytest.mark.deep)]
)
@pytest.mark.parametrize(
    ("settings", "world_size"),
    [
        ({"sharding": "grad_op"}, 2),
        ({"sharding": "hybrid", "hybrid_shard_size": 2, "activation_checkpointing": True}, 4),
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


def test_in_16_bits_a_forward_without_a_backward_is_forgotten_or_an_error(ranks: Ranks) -> None:
    def work(how: str) -> list[Any]:
        run = Run("blocks", config(mixed_precision="bf16"), make_optimizer=lambda values: torch.optim.SGD(values, 0.1))
        kept = []
        for seed in range(2):
            if how != "straight":
                kept.append(run.model(run.case.batch(seed=9)[0]))
            if how == "dropped":
                kept.clear()
            try:
                run.step(seed)
            except TrainingError as error:
                return [str(error)]
        return [run.local()]

    def both_in_one_backward() -> bool:
        run = Run("blocks", config(mixed_precision="bf16"))
        losses = [run.case.loss(run.model(run.case.batch(seed)[0]), run.case.batch(seed)[1]) for seed in range(2)]
        (losses[0] + losses[1]).backward()
        return all(parameter.grad is not None for parameter in run.model.parameters() if parameter.numel())

    ways = [ranks(work, how) for how in ("straight", "dropped", "kept")]
    for (straight,), (dropped,), (message,) in zip(*ways, strict=True):
        assert differences(dropped, straight) == []
        assert "evaluate under torch.no_grad()" in message
    assert ranks(both_in_one_backward) == [True, True]


def test_a_group_that_does_not_divide_the_world_and_an_unknown_class_are_refused(ranks: Ranks) -> None:
    def work() -> list[Any]:
        found: list[Any] = []
        for settings in (
            {"sharding": "hybrid", "hybrid_shard_size": 2},
            {"wrap_layers": ("Block",)},
            {"sharding": "hybrid"},
        ):
            model = CASES["blocks"].build(seed=collective.rank())
            before = [type(module) for module in model.modules()]
            with pytest.raises(WrapError) as caught:
                wrapped(model, **settings)
            found.append((str(caught.value).partition(": ")[2], before == [type(module) for module in model.modules()]))
        return found

    divisors = "does not divide the world size, 3; allowed for fsdp_hybrid_shard_size are 3"
    unknown = (
        "fsdp_wrap_layers names 'Block', and no module inside the model is of this class; its classes are 'LayerNorm', "
        "'Linear', 'ModuleList', 'Residual'"
    )
    expected = [
        (f"fsdp_hybrid_shard_size = 2 {divisors}", True),
        (unknown, True),
        (f"LOCAL_WORLD_SIZE = 2 {divisors}", True),
    ]
    assert ranks(work, world_size=3, env={"LOCAL_WORLD_SIZE": "2"}) == [expected] * 3


def test_a_group_size_without_groups_is_no_config() -> None:
    with pytest.raises(ConfigError, match="hybrid_shard_size = 2 is in vain with sharding = 'grad_op'"):
        DistributedConfig(fsdp_sharding="grad_op", fsdp_hybrid_shard_size=2)
