"""What the settings of a sharding strategy come to on a model, without ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallel_core import ConfigError, sharding, sharding_checks
from parallel_core.sharding_config import ShardingConfig
from parallel_core.testing.models import CASES


def problems(model: nn.Module, *, one_dtype: bool = True, **settings: Any) -> list[str]:
    config = ShardingConfig(**settings)
    return list(sharding_checks.problems(model, config, torch.device("cpu"), "mine", one_dtype=one_dtype))


@pytest.mark.parametrize("case", [name for name in CASES if name not in ("scalar_parameter", "mixed_dtypes")])
def test_nothing_speaks_against_most_models(case: str) -> None:
    assert problems(CASES[case].build()) == []


def test_settings_are_named_with_the_strategys_prefix() -> None:
    (found,) = problems(CASES["blocks"].build(), cpu_offload=True)
    assert found.startswith("mine_cpu_offload keeps parameters on the CPU")
    assert found.endswith("set mine_cpu_offload = false")


def test_a_unit_of_two_dtypes_is_a_problem_or_only_where_both_train() -> None:
    model = CASES["adapter"].build()
    model.get_submodule("frozen").to(torch.bfloat16)
    assert problems(model, one_dtype=False) == []
    (found,) = problems(model)
    assert found.startswith("the root unit has parameters of bfloat16 ('frozen.weight') and float32 ('down.weight')")


def test_what_has_no_forward_cannot_be_wrapped() -> None:
    (found,) = problems(nn.ModuleDict({"a": nn.Linear(2, 2)}))
    assert found.startswith("the model is a ModuleDict, which has no forward")


def test_without_a_launcher_hybrid_needs_the_size_of_its_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    (found,) = problems(CASES["blocks"].build(), sharding="hybrid")
    assert "LOCAL_WORLD_SIZE is None; set mine_hybrid_shard_size" in found


def test_the_dtype_of_reduction_is_that_of_computation_unless_it_is_named() -> None:
    assert sharding.dtypes(ShardingConfig(mixed_precision="fp32")) == (None, None)
    assert sharding.dtypes(ShardingConfig()) == (torch.bfloat16, torch.bfloat16)
    assert sharding.dtypes(ShardingConfig(reduce_precision="fp32")) == (torch.bfloat16, torch.float32)
    assert sharding.dtypes(ShardingConfig(mixed_precision="fp32", reduce_precision="fp16")) == (None, torch.float16)


def test_a_batch_norm_is_a_unit_of_its_own_in_16_bits() -> None:
    model = CASES["batch_norm"].build()
    assert [unit.name for unit in sharding.plan(model, ShardingConfig())] == ["1"]
    assert sharding.plan(model, ShardingConfig(mixed_precision="fp32")) == []


def test_settings_that_contradict_each_other_are_no_config() -> None:
    with pytest.raises(ConfigError, match="hybrid_shard_size = 4 is in vain with sharding = 'full'"):
        ShardingConfig(hybrid_shard_size=4)


def test_what_a_bare_model_lacks_is_named() -> None:
    asked = ShardingConfig(cpu_offload=True, activation_checkpointing=True)
    assert list(asked.lost_if_declined()) == ["mixed_precision", "cpu_offload", "activation_checkpointing"]
    assert list(ShardingConfig(mixed_precision="fp32").lost_if_declined()) == []
