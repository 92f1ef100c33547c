"""What the settings of a sharding strategy come to on a model, without ranks."""

from __future__ import annotations

import logging
import weakref
from collections import UserDict, deque
from functools import partial
from types import SimpleNamespace
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


class Keeper(nn.Module):
    """Keeps a parameter beside the module that owns it."""

    def __init__(self, **kept: object) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, make in kept.items():
            vars(self)[name] = make(self.layer.weight) if callable(make) else make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held


class Holder:
    def __init__(self, held: object) -> None:
        self.held = held


@pytest.mark.parametrize(
    "keep",
    [
        lambda weight: weight,
        lambda weight: [1, weight],
        lambda weight: {"w": weight},
        lambda weight: (weight,),
        lambda weight: {"x": [{weight}]},
        lambda weight: Holder(weight),
        lambda weight: [Holder(weight)],
        lambda weight: SimpleNamespace(w=weight),
        lambda weight: SimpleNamespace(g={"w": [weight]}),
        lambda weight: deque([weight]),
        lambda weight: UserDict(w=weight),
        lambda weight: partial(torch.norm, weight),
        lambda weight: Slots(weight),
        lambda weight: weakref.ref(weight),
        lambda weight: lambda: weight,
        lambda weight: weight.detach(),
        lambda weight: [weight.data[:1]],
    ],
)
def test_a_parameter_that_a_module_keeps_elsewhere_too_is_named(keep: Any) -> None:
    (found,) = problems(nn.Sequential(Keeper(kept=keep)))
    assert found == (
        "'0' keeps parameter '0.layer.weight' in its attribute 'kept' too, where mine can't put its shard; reach it "
        "through the module that owns it, or use nn.ParameterList"
    )


class Telling(Keeper):
    """Has a way of its own to set an attribute, which changes nothing."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


class Recurrent(nn.LSTM):
    """Keeps a weight beside the list that torch itself keeps up to date."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.mine = [self.weight_ih_l0]


@pytest.mark.parametrize("make", [lambda: Telling(kept=lambda weight: [weight]), Recurrent])
def test_a_module_that_sets_attributes_in_its_own_way_is_looked_into_too(make: Any) -> None:
    (found,) = problems(nn.Sequential(make()))
    assert found.startswith("'0' keeps parameter '0.")


class Strange:
    """Fails whatever it is asked."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("not ready")


def test_what_is_kept_without_harm_is_no_problem() -> None:
    spectral = nn.utils.spectral_norm(nn.Linear(2, 2))  # makes its weight in each forward
    model = Keeper(kept=Strange(), scale=torch.ones(2), note=lambda _: "text")
    vars(model)["optimizer"] = torch.optim.SGD(model.parameters())  # wrap_optimizer refuses it
    vars(model)["module"] = [model.layer]
    vars(model)["self"] = weakref.ref(model)
    vars(model)["log"] = logging.getLogger("mine")
    vars(model)["parts"] = (each for each in [model.layer.weight])
    try:
        raise ZeroDivisionError(model.layer.weight)
    except ZeroDivisionError as error:
        vars(model)["failed"] = error
    vars(logging.getLogger("theirs"))["note"] = model.layer.weight
    model.layer.compile(backend="eager")
    try:
        assert problems(nn.Sequential(spectral, model)) == []
    finally:
        del vars(logging.getLogger("theirs"))["note"]


def test_other_things_in_attributes_and_the_lists_of_recurrent_layers_are_no_problem() -> None:
    strange = nn.Parameter(torch.ones(2))  # of another model
    around: list[object] = [strange]
    around.append(around)  # has itself as a part
    model = nn.Sequential(Keeper(kept=around, number=3, names={"a": "b"}, kinds={"a": Holder}), nn.LSTM(2, 2))
    assert problems(model) == []


def test_a_hook_for_a_gradient_is_a_problem_until_it_is_removed() -> None:
    model = nn.Linear(2, 2)
    handles = [
        model.weight.register_hook(lambda gradient: gradient),
        model.bias.register_post_accumulate_grad_hook(lambda parameter: None),
    ]
    assert [found.split(",")[0] for found in problems(model)] == [
        "parameter 'weight' has a hook for its gradient",
        "parameter 'bias' has a hook for its gradient",
    ]
    for handle in handles:
        handle.remove()
    assert problems(model) == []


def test_what_no_strategy_can_send_is_a_problem_too() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("near", torch.eye(2).to_sparse())
    model.register_parameter("sparse", nn.Parameter(torch.eye(2).to_sparse()))
    model.register_parameter("nothing", nn.Parameter(torch.ones(0, 2)))
    found = problems(model)
    assert [each.split(" is ")[0] for each in found[:2]] == ["parameter 'sparse'", "buffer 'near'"]
    assert found[2:] == ["parameter 'nothing' has no elements, and mine can't cut it; leave it out"]


def test_parameters_in_one_memory_are_a_problem() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    (found,) = problems(model)
    assert found.startswith("parameter '0.weight' and parameter '1.weight' lie in the same memory")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_gloo_cannot_send_is_a_problem_on_the_cpu(dtype: torch.dtype) -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(model.weight.to(dtype), requires_grad=False)
    name = str(dtype).removeprefix("torch.")
    assert problems(model) == [
        f"parameter 'weight' has dtype {name}, which gloo can't send; use another dtype, or train on a GPU"
    ]


class Renaming(nn.Module):
    """Saves its weight under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

        def rename(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            state[f"{prefix}w"] = state.pop(f"{prefix}layer.weight")

        self.register_state_dict_post_hook(rename)  # type: ignore[no-untyped-call]  # torch's own is not annotated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def test_a_parameter_without_its_name_in_the_state_dict_is_a_problem() -> None:
    (found,) = problems(nn.Sequential(Renaming()))
    assert found.startswith("the state dict of the model has no '0.layer.weight', which is a parameter: a hook, or an")


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("min_params", [0, 1_000_000])
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 2))])
def test_a_script_module_is_a_problem(make: Any, min_params: int) -> None:
    text = "is a ScriptModule, in which mine can't put shards; wrap the Python module that it was made of"
    scripted = make(nn.Linear(2, 2))
    assert problems(nn.Sequential(scripted), auto_wrap_min_params=min_params) == [f"'0' {text}"]
    assert problems(scripted, auto_wrap_min_params=min_params) == [f"'the model' {text}"]
