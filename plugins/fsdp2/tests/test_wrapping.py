"""What fsdp2 makes of its settings, as seen on the wrapped model, and what it refuses."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

import parallel_core
from parallel_core import ConfigError, DistributedConfig, WrapError
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.models import CASES


def wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    """Wrap a model under these settings of fsdp2, by default in fp32."""
    named = {f"fsdp2_{name}": value for name, value in {"mixed_precision": "fp32", **settings}.items()}
    answer = parallel_core.wrap_model_for_training(model, DistributedConfig(parallel_strategy="fsdp2", **named))
    assert answer is not None
    return answer


def units_of(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def backward(model: nn.Module, case: str = "blocks") -> None:
    inputs, targets = CASES[case].batch(seed=collective.rank())
    CASES[case].loss(model(inputs), targets).backward()


def refused(model: nn.Module, **settings: Any) -> str:
    """Return the error of a wrap, having seen that it left the model as it was."""
    before = [(name, id(value)) for name, value in (*model.named_parameters(), *model.named_buffers())]
    classes = [type(module) for module in model.modules()]
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WrapError) as caught:
        wrapped(model, **settings)
    assert before == [(name, id(value)) for name, value in (*model.named_parameters(), *model.named_buffers())]
    assert classes == [type(module) for module in model.modules()]
    assert all(torch.equal(values[name], value) for name, value in model.state_dict().items())
    return str(caught.value).removeprefix("strategy 'fsdp2' can't wrap this model: ")


def test_each_module_above_the_threshold_is_a_unit(ranks: Ranks) -> None:
    def work() -> list[list[str]]:
        return [units_of(wrapped(CASES["blocks"].build(), auto_wrap_min_params=number)) for number in (168, 80, 10**6)]

    blocks = [f"blocks.{index}" for index in range(2)]
    ups = [name for block in blocks for name in (block, f"{block}.up")]  # a block has 84 parameters without its `up`
    assert ranks(work) == [[["", *blocks], ["", *ups], [""]]] * 2


def test_each_module_of_a_class_that_is_named_is_a_unit_whole(ranks: Ranks) -> None:
    def work() -> list[list[str]]:
        build = CASES["blocks"].build
        return [
            units_of(wrapped(build(), wrap_layers=("Residual",), auto_wrap_min_params=0)),
            units_of(wrapped(build(), wrap_layers=("Residual", "Linear"), auto_wrap_min_params=10**6)),
        ]

    blocks = ["blocks.0", "blocks.1"]
    layers = [name for block in blocks for name in (block, f"{block}.up", f"{block}.down")]
    assert ranks(work) == [[["", *blocks], ["", *layers]]] * 2


def test_a_threshold_that_nothing_meets_warns_with_the_value_that_would_do(ranks: Ranks) -> None:
    def work() -> list[str]:
        messages: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]  # to catch it
        logger = logging.getLogger("parallel_core_fsdp2")
        logger.addHandler(handler)
        try:
            wrapped(CASES["blocks"].build(), auto_wrap_min_params=100_000_000)
            wrapped(CASES["blocks"].build(), wrap_layers=("Residual",))
        finally:
            logger.removeHandler(handler)
        return messages

    first, second = ranks(work)
    assert second == []
    assert len(first) == 1
    assert "set fsdp2_auto_wrap_min_params = 168 or less" in first[0]


@pytest.mark.parametrize(
    ("settings", "unit", "root"),
    [
        ({}, "sharded", "whole"),
        ({"sharding": "grad_op"}, "whole", "whole"),
        ({"reshard_after_forward": True}, "sharded", "sharded"),
        ({"reshard_after_forward": False}, "whole", "whole"),
        ({"sharding": "grad_op", "reshard_after_forward": False}, "whole", "whole"),
    ],
)
def test_sharding_decides_what_is_freed_after_a_forward(
    ranks: Ranks, settings: dict[str, Any], unit: str, root: str
) -> None:
    def work() -> list[Any]:
        model = wrapped(CASES["language_model"].build(), auto_wrap_min_params=100, **settings)
        embedding, block = model.get_parameter("embedding.weight"), model.get_parameter("body.0.up.weight")
        assert isinstance(embedding, DTensor)
        assert isinstance(block, DTensor)
        before = [embedding.device_mesh.shape, embedding.placements == block.placements == (Shard(0),)]
        output = model(CASES["language_model"].batch(seed=0)[0])
        held = [
            "sharded" if isinstance(model.get_parameter(name), DTensor) else "whole"
            for name in ("body.0.up.weight", "embedding.weight")
        ]
        output.sum().backward()
        after = {isinstance(parameter, DTensor) for parameter in model.parameters()}
        return [*before, held, after]

    assert ranks(work) == [[(2,), True, [unit, root], {True}]] * 2


def test_hybrid_shards_in_groups_and_replicates_between_them(ranks: Ranks) -> None:
    def work() -> list[Any]:
        model = wrapped(CASES["blocks"].build(), auto_wrap_min_params=100, sharding="hybrid", hybrid_shard_size=2)
        weight = model.get_parameter("blocks.0.up.weight")
        assert isinstance(weight, DTensor)
        mesh = weight.device_mesh
        found = [mesh.mesh.tolist(), mesh.mesh_dim_names, weight.placements == (Replicate(), Shard(0))]
        return [*found, tuple(weight.to_local().shape), parallel_core.data_parallel(model)]

    mesh = [[[0, 1], [2, 3]], ("replicate", "shard"), True, (6, 6)]
    assert ranks(work, world_size=4) == [[*mesh, (rank, 4)] for rank in range(4)]


def test_hybrid_shards_over_one_machine_by_default(ranks: Ranks) -> None:
    def work() -> list[Any]:
        weight = wrapped(CASES["blocks"].build(), sharding="hybrid").get_parameter("blocks.0.up.weight")
        assert isinstance(weight, DTensor)
        return [weight.device_mesh.shape]

    assert ranks(work, world_size=4, env={"LOCAL_WORLD_SIZE": "2"}) == [[(2, 2)]] * 4


@pytest.mark.parametrize(
    ("settings", "computed", "reduced"),
    [
        ({"mixed_precision": "bf16"}, torch.bfloat16, torch.bfloat16),
        ({"mixed_precision": "fp16"}, torch.float16, torch.float16),
        ({"mixed_precision": "fp32"}, torch.float32, torch.float32),
        ({"mixed_precision": "bf16", "reduce_precision": "fp32"}, torch.bfloat16, torch.float32),
        ({"mixed_precision": "fp32", "reduce_precision": "bf16"}, torch.float32, torch.bfloat16),
    ],
)
def test_it_computes_in_one_dtype_reduces_in_another_and_saves_in_the_models(
    ranks: Ranks, settings: dict[str, Any], computed: torch.dtype, reduced: torch.dtype
) -> None:
    def work() -> list[Any]:
        model = CASES["blocks"].build()
        seen = set()
        model.get_submodule("blocks.1.up").register_forward_hook(lambda module, args, output: seen.add(output.dtype))
        result = wrapped(model, auto_wrap_min_params=50, **settings)
        backward(result)
        states: list[Any] = [module._get_fsdp_state() for module in result.modules() if isinstance(module, FSDPModule)]
        policies = [state._mp_policy for state in states]
        # What torch is given: where it has no dtype of its own, the reduction is in that of the computation.
        reductions = {policy.reduce_dtype or policy.param_dtype or torch.float32 for policy in policies}
        saved = parallel_core.model_state_dict(result, "sharded")
        return [seen, reductions, {value.dtype for value in saved.values()}, grads(result)]

    def grads(model: nn.Module) -> set[torch.dtype]:
        return {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}

    assert ranks(work) == [[{computed}, {reduced}, {torch.float32}, {torch.float32}]] * 2


def test_batch_norm_trains_in_bf16_and_keeps_its_statistics_in_fp32(ranks: Ranks) -> None:
    def work() -> list[Any]:
        result = wrapped(CASES["batch_norm"].build(), mixed_precision="bf16", auto_wrap_min_params=20)
        backward(result, "batch_norm")
        state = parallel_core.model_state_dict(result, "sharded")
        return [{name: value.dtype for name, value in state.items()}, bool(state["1.running_mean"].abs().sum() > 0)]

    dtypes = {name: value.dtype for name, value in CASES["batch_norm"].build().state_dict().items()}
    assert ranks(work) == [[dtypes, True]] * 2


def test_with_checkpointing_each_unit_is_computed_twice_and_names_stay_bare(ranks: Ranks) -> None:
    def work(on: bool) -> list[Any]:
        calls = []
        model = CASES["blocks"].build()
        model.get_submodule("blocks.1.up").register_forward_hook(lambda *_: calls.append(1))
        result = wrapped(model, wrap_layers=("Residual",), activation_checkpointing=on)
        wrappers = [name for name, module in result.named_modules() if isinstance(module, CheckpointWrapper)]
        inside = [isinstance(module, FSDPModule) for module in result.modules() if type(module).__name__ == "Residual"]
        backward(result)
        bare = [name for name, _ in CASES["blocks"].build().named_parameters()]
        optimizer = parallel_core.wrap_optimizer(result, torch.optim.AdamW(result.parameters()))
        optimizer.step()
        state = parallel_core.optimizer_state_dict(result, optimizer, "sharded")
        names = list(parallel_core.model_state_dict(result, "sharded")) == list(state["state"]) == bare
        return [len(calls), wrappers, names, any(inside)]

    assert ranks(work, False) == [[1, [], True, False]] * 2
    assert ranks(work, True) == [[2, ["blocks.0", "blocks.1"], True, False]] * 2


def test_with_checkpointing_buffers_are_changed_once(ranks: Ranks) -> None:
    def work() -> list[Any]:
        found = []
        for on in (False, True):
            model = nn.Sequential(*(CASES["batch_norm"].build() for _ in range(2)))
            result = wrapped(model, wrap_layers=("Sequential",), activation_checkpointing=on)
            for _ in range(2):
                backward(result, "batch_norm")
            found.append({name: value.clone() for name, value in result.named_buffers()})
        plain, recomputed = (list(buffers.values()) for buffers in found)
        return [torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True)]

    assert ranks(work) == [[True] * 6] * 2


def test_initial_values_are_compared_where_they_are_not_taken_from_rank_0(ranks: Ranks) -> None:
    def work(same: bool) -> str:
        model = CASES["blocks"].build(seed=0 if same else collective.rank())
        if same:
            wrapped(model, sync_module_states=False)
            return "no error"
        return refused(model, sync_module_states=False)

    assert ranks(work, True) == ["no error"] * 2
    message = (
        "initial values differ between ranks, first those of 'blocks.0.up.weight' (6 of 10 tensors); seed all "
        "ranks alike, or set fsdp2_sync_module_states = true"
    )
    assert ranks(work, False) == [message] * 2


class Odd(nn.Module):
    """Parameters that can't be sharded, beside one that can."""

    def __init__(self, **parameters: nn.Parameter) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def compiled(model: nn.Module) -> nn.Module:
    found: Any = torch.compile(model, backend="aot_eager")
    assert isinstance(found, nn.Module)
    return found


def test_what_cannot_be_done_is_refused_by_name_with_the_model_as_it_was(ranks: Ranks) -> None:
    def work() -> list[str]:
        steps = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
        waves = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        blocks = CASES["blocks"].build
        return [
            refused(Odd(scale=nn.Parameter(torch.ones(())))),
            refused(Odd(steps=steps)),
            refused(Odd(waves=waves)),
            refused(Odd(narrow=nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))),
            refused(nn.ModuleList([nn.Linear(2, 2)])),
            refused(Odd(turned=nn.Parameter(torch.ones(2, 3).t()))),
            refused(nn.Sequential(nn.Embedding(4, 2, sparse=True))),
            refused(compiled(CASES["batch_norm"].build()), activation_checkpointing=True, auto_wrap_min_params=0),
            refused(blocks(), cpu_offload=True),
            refused(blocks(), wrap_layers=("Residul", "Linear")),
            refused(blocks(), wrap_layers=("GELU",)),
            refused(blocks(), wrap_layers=("ModuleList",)),
            refused(CASES["tied_in_blocks"].build(), wrap_layers=("Residual",)),
            refused(blocks(), sharding="hybrid", hybrid_shard_size=4),
        ]

    first, second = ranks(work)
    assert first == second
    fragments = [
        "parameter 'scale' has no dimensions",
        "parameter 'steps' has dtype int64, and fsdp2 shards floating point only",
        "parameter 'waves' has dtype complex64, and fsdp2 shards floating point only",
        "the root unit has parameters of bfloat16 ('narrow') and float32 ('layer.weight')",
        "the model is a ModuleList, which has no forward",
        "parameter 'turned' of shape [3, 2] is not contiguous",
        "'0' makes sparse gradients",
        "computes unit '1' again with the buffers that it had ('running_mean'), which torch.compile can't follow",
        "fsdp2_cpu_offload keeps parameters on the CPU while an accelerator computes",
        "its classes are 'LayerNorm', 'Linear', 'ModuleList', 'Residual'; did you mean 'Residual'?",
        "fsdp2_wrap_layers names 'GELU'",
        "fsdp2_wrap_layers names 'ModuleList', and 'blocks' can't be a unit",
        "fsdp2_wrap_layers names 'Residual', and 'left' can't be a unit",
        "fsdp2_hybrid_shard_size = 4 does not divide the world size, 2; allowed for fsdp2_hybrid_shard_size are 2",
    ]
    assert [fragment in message for fragment, message in zip(fragments, first, strict=True)] == [True] * 14, first


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_script_module_is_refused_as_such(ranks: Ranks) -> None:
    def work() -> list[str]:
        scripted = torch.jit.script(nn.Linear(2, 2))
        return [refused(scripted), refused(nn.Sequential(scripted), auto_wrap_min_params=0)]

    text = "is a ScriptModule, in which fsdp2 can't put shards; wrap the Python module that it was made of"
    assert ranks(work) == [[f"'the model' {text}", f"'0' {text}"]] * 2


def test_settings_that_contradict_each_other_are_no_config() -> None:
    with pytest.raises(ConfigError, match="hybrid_shard_size = 2 is in vain with sharding = 'full'"):
        DistributedConfig(fsdp2_hybrid_shard_size=2)
    with pytest.raises(ConfigError, match="reshard_after_forward = true contradicts sharding = 'grad_op'"):
        DistributedConfig(fsdp2_sharding="grad_op", fsdp2_reshard_after_forward=True)


def test_frozen_parameters_may_have_another_dtype_than_those_that_train(ranks: Ranks) -> None:
    def work() -> list[Any]:
        model = CASES["adapter"].build()
        frozen = model.get_submodule("frozen").to(torch.float64)
        frozen.register_forward_pre_hook(lambda module, args: (args[0].double(),))
        result = wrapped(model, auto_wrap_min_params=10**6)
        backward(result, "adapter")
        return [{name: parameter.grad is not None for name, parameter in result.named_parameters()}]

    expected = {"frozen.weight": False, "frozen.bias": False, "down.weight": True, "up.weight": True}
    assert ranks(work) == [[expected]] * 2


def test_a_parameter_of_another_wrapped_model_is_refused(ranks: Ranks) -> None:
    def work() -> str:
        shared = nn.Linear(4, 4)
        wrapped(nn.Sequential(shared, nn.Linear(4, 1)))
        other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        other[0].weight = shared.weight
        with pytest.raises(WrapError) as caught:
            wrapped(other)
        return str(caught.value).removeprefix("strategy 'fsdp2' can't wrap this model: ")

    told = "'0.weight' is in shards already, as a part of another wrapped model; build a bare model with its own"
    assert all(found.startswith(told) for found in ranks(work))


def test_of_each_class_one_is_made_as_by_fully_shard_itself(ranks: Ranks) -> None:
    def work() -> list[Any]:
        registry: list[str] = []

        class Registered(nn.Linear):
            def __init_subclass__(cls) -> None:
                if cls.__name__ in registry:
                    raise ValueError(f"{cls.__name__} is registered already")
                registry.append(cls.__name__)

        wrapped(nn.Sequential(Registered(4, 4)), auto_wrap_min_params=1)
        model = wrapped(nn.Sequential(Registered(4, 4), Registered(4, 4)), auto_wrap_min_params=1)
        with pytest.raises(AssertionError, match="does not support deepcopy"):
            copy.deepcopy(model)
        return [registry, [type(module).__name__ for module in model.children()]]

    assert ranks(work) == [[["FSDPRegistered"], ["FSDPRegistered"] * 2]] * 2


class Final(nn.Linear):
    """Will not be inherited from."""

    def __init_subclass__(cls) -> None:
        raise TypeError("final")


class Immutable(nn.Linear):
    """Takes no attribute once it is built."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        vars(self)["built"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "built" in vars(self):
            raise AttributeError("built")
        super().__setattr__(name, value)


class Named(nn.Linear):
    """Has an attribute that a unit has a method for."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.reshard = True


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Final(4, 4), "'0' is a Final, of which fully_shard can't make a class of its own: TypeError: final;"),
        (Immutable, "'0' is a Immutable, of which fully_shard can't make a class of its own: AttributeError: built;"),
        (Named, "'0' has an attribute 'reshard', which is the name of a method of FSDPModule; rename it"),
    ],
)
def test_a_class_that_fully_shard_cannot_change_is_refused_before_it_is_touched(
    ranks: Ranks, make: Any, told: str
) -> None:
    def work() -> list[Any]:
        model = nn.Sequential(make(), nn.Linear(4, 4))
        with pytest.raises(WrapError) as caught:
            wrapped(model, auto_wrap_min_params=1)
        types = [type(module).__name__ for module in model]
        return [told in str(caught.value), types[1], {type(each) for each in model.parameters()}]

    assert ranks(work) == [[True, "Linear", {nn.Parameter}]] * 2


def test_what_is_set_on_a_parameter_stays(ranks: Ranks) -> None:
    def work() -> list[Any]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        # Marks, as optimizers' groups are made by.
        vars(model.get_parameter("0.weight"))["no_weight_decay"] = True
        vars(model.get_parameter("1.bias"))["lr_scale"] = 0.5
        result = wrapped(model, auto_wrap_min_params=20)
        result(torch.ones(2, 4)).sum().backward()
        named = dict(result.named_parameters())
        return [vars(named["0.weight"])["no_weight_decay"], vars(named["1.bias"])["lr_scale"]]

    assert ranks(work) == [[True, 0.5]] * 2
