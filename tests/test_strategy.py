"""A bound strategy: one typed method a hook, and what comes back is checked."""

# mypy: disable-error-code="override"
# The strategies below leave out arguments, as strategies may.

from __future__ import annotations

import importlib.metadata
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from parallel_core import (
    StateDictType,
    StrategyConfig,
    clip_grad_norm,
    data_parallel,
    grad_scaler,
    hookimpl,
    load_model_state_dict,
    load_optimizer_state_dict,
    model_state_dict,
    no_sync,
    optimizer_state_dict,
)
from parallel_core.errors import ParallelCoreError, StateDictError, StrategyError, WrapError
from parallel_core.hookspecs import ENTRY_POINT_GROUP
from parallel_core.registry import Registration
from parallel_core.strategy import Strategy, available_strategies, bare_model_strategy, bound_strategy
from parallel_core.testing import Ranks
from parallel_core.units import Unit

Install = Callable[..., str]

CPU = torch.device("cpu")
MODEL = nn.Linear(2, 2)
OPTIMIZER = torch.optim.SGD(MODEL.parameters())
CONFIG = StrategyConfig()
FULL = StateDictType.FULL


class Ring:
    @hookimpl
    def strategy_config(self) -> type[StrategyConfig]:
        return StrategyConfig

    @hookimpl
    def wrap_model(self, model: nn.Module) -> Any:
        return model


def bound(plugin: object) -> Strategy:
    entry_point = importlib.metadata.EntryPoint("ring", "pc_ring:plugin", ENTRY_POINT_GROUP)
    return Strategy(Registration("ring", "pc-ring", "1.0", entry_point), plugin)


def answering(hook: str, answer: Any) -> Strategy:
    def implementation(self: Any) -> Any:
        return answer

    return bound(type("Answering", (Ring,), {hook: hookimpl(implementation)})())


CALLS: dict[str, Callable[[Strategy], Any]] = {
    "applies": lambda strategy: strategy.applies(2, CPU),
    "plan_units": lambda strategy: strategy.plan_units(MODEL, CONFIG),
    "check_model": lambda strategy: strategy.check_model(MODEL, CONFIG, CPU),
    "wrap_model": lambda strategy: strategy.wrap_model(MODEL, CONFIG, CPU),
    "wrap_optimizer": lambda strategy: strategy.wrap_optimizer(MODEL, OPTIMIZER, CONFIG),
    "model_state_dict": lambda strategy: strategy.model_state_dict(MODEL, FULL),
    "optimizer_state_dict": lambda strategy: strategy.optimizer_state_dict(MODEL, OPTIMIZER, FULL),
    "clip_grad_norm": lambda strategy: strategy.clip_grad_norm(MODEL, 1.0, 2.0),
    "no_sync": lambda strategy: strategy.no_sync(MODEL),
    "has_unsynchronised_gradients": lambda strategy: strategy.has_unsynchronised_gradients(MODEL),
    "grad_scaler": lambda strategy: strategy.grad_scaler(MODEL),
    "data_parallel": lambda strategy: strategy.data_parallel(MODEL),
}

EXPECTED = {
    "applies": "bool",
    "plan_units": "list",
    "check_model": "list",
    "wrap_model": "Module",
    "wrap_optimizer": "Optimizer",
    "model_state_dict": "dict",
    "optimizer_state_dict": "dict",
    "clip_grad_norm": "Tensor",
    "no_sync": "AbstractContextManager",
    "has_unsynchronised_gradients": "bool",
    "grad_scaler": "GradScaler",
    "data_parallel": "tuple",
}

RIGHT = {
    "applies": True,
    "plan_units": [Unit("0", MODEL, {})],
    "check_model": ["a reason"],
    "wrap_model": MODEL,
    "wrap_optimizer": OPTIMIZER,
    "model_state_dict": {"weight": 1},
    "optimizer_state_dict": {"state": {}, "param_groups": []},
    "clip_grad_norm": torch.tensor(1.0),
    "no_sync": nullcontext(),
    "has_unsynchronised_gradients": True,
    "grad_scaler": torch.amp.GradScaler("cpu", enabled=False),
    "data_parallel": (0, 1),
}

each_answer = pytest.mark.parametrize("hook", CALLS)


@each_answer
def test_a_hook_that_must_return_something_and_returns_none_is_an_error_that_names_it(hook: str) -> None:
    with pytest.raises(StrategyError) as caught:
        CALLS[hook](answering(hook, None))
    assert str(caught.value) == (
        f"strategy 'ring' (pc-ring 1.0): hook {hook} returned NoneType, expected {EXPECTED[hook]}; "
        "this is a bug in pc-ring"
    )


@each_answer
def test_an_answer_of_another_kind_is_an_error_that_names_the_hook(hook: str) -> None:
    with pytest.raises(
        StrategyError, match=rf"^strategy 'ring' \(pc-ring 1.0\): hook {hook} returned object, expected "
    ):
        CALLS[hook](answering(hook, object()))


@each_answer
def test_a_right_answer_is_handed_on_as_it_is(hook: str) -> None:
    assert CALLS[hook](answering(hook, RIGHT[hook])) is RIGHT[hook]


@pytest.mark.parametrize("hook", ["check_model", "plan_units"])
def test_a_list_of_something_else_is_an_error_that_names_the_hook(hook: str) -> None:
    kind = {"check_model": "str", "plan_units": "Unit"}[hook]
    with pytest.raises(StrategyError) as caught:
        CALLS[hook](answering(hook, [*RIGHT[hook], 3]))  # type: ignore[misc]  # both are lists
    assert str(caught.value) == (
        f"strategy 'ring' (pc-ring 1.0): hook {hook} returned a list with int in it, expected {kind} alone; "
        "this is a bug in pc-ring"
    )


@pytest.mark.parametrize(
    ("hook", "answer", "told"),
    [
        ("data_parallel", (2, 2), "(2, 2), expected (index, count), with an index from 0 to count - 1"),
        ("data_parallel", (-1, 2), "(-1, 2), expected (index, count), with an index from 0 to count - 1"),
        ("data_parallel", ("a", 2), "('a', 2), expected (index, count), with an index from 0 to count - 1"),
        ("data_parallel", (0, 1, 2), "(0, 1, 2), expected (index, count), with an index from 0 to count - 1"),
        ("clip_grad_norm", torch.ones(2), "a tensor of shape [2], expected one without dimensions"),
        ("optimizer_state_dict", {"state": 5}, "a dict with ['state'], expected one of 'state' and 'param_groups'"),
    ],
)
def test_an_answer_of_the_right_kind_that_can_not_be_is_refused(hook: str, answer: Any, told: str) -> None:
    with pytest.raises(StrategyError) as caught:
        CALLS[hook](answering(hook, answer))
    assert str(caught.value) == (
        f"strategy 'ring' (pc-ring 1.0): hook {hook} returned {told}; this is a bug in pc-ring"
    )


def test_local_shards_are_looked_at_one_by_one() -> None:
    with pytest.raises(
        StrategyError, match="hook local_shards returned int for 'weight', expected LocalShard; this is"
    ):
        answering("local_shards", {"weight": 5}).local_shards(MODEL)


def test_a_strategy_that_fails_to_say_whether_it_applies_is_named() -> None:
    class Failing(Ring):
        @hookimpl
        def applies(self) -> bool:
            raise ZeroDivisionError("division by zero")

    with pytest.raises(WrapError, match=r"'ring' \(pc-ring 1.0\) failed to say whether it applies: ZeroDivisionError"):
        bound(Failing()).applies(2, CPU)


def test_a_sentence_in_place_of_a_list_of_reasons_is_refused() -> None:
    with pytest.raises(StrategyError, match="hook check_model returned str, expected list"):
        answering("check_model", "no GPU").check_model(MODEL, CONFIG, CPU)


def test_loading_hooks_return_nothing() -> None:
    calls: list[tuple[Any, ...]] = []

    class Loading(Ring):
        @hookimpl
        def load_model_state_dict(self, model: Any, state_dict: Any, state_dict_type: Any) -> None:
            calls.append((model, state_dict, state_dict_type))

        @hookimpl
        def load_optimizer_state_dict(self, optimizer: Any, state_dict: Any) -> None:
            calls.append((optimizer, state_dict))

    strategy = bound(Loading())
    strategy.load_model_state_dict(MODEL, {"a": 1}, FULL)
    strategy.load_optimizer_state_dict(MODEL, OPTIMIZER, {"b": 2}, FULL)
    assert calls == [(MODEL, {"a": 1}, FULL), (OPTIMIZER, {"b": 2})]


def test_each_method_passes_every_argument_to_its_hook() -> None:
    seen: dict[str, tuple[Any, ...]] = {}

    class Watching(Ring):
        @hookimpl
        def applies(self, world_size: int, device: Any) -> bool:
            seen["applies"] = (world_size, device)
            return True

        @hookimpl
        def wrap_model(self, model: Any, config: Any, device: Any) -> Any:
            seen["wrap_model"] = (model, config, device)
            return model

        @hookimpl
        def clip_grad_norm(self, model: Any, max_norm: float, norm_type: float) -> Any:
            seen["clip_grad_norm"] = (model, max_norm, norm_type)
            return torch.tensor(0.0)

    strategy = bound(Watching())
    for hook in ("applies", "wrap_model", "clip_grad_norm"):
        CALLS[hook](strategy)
    assert seen == {
        "applies": (2, CPU),
        "wrap_model": (MODEL, CONFIG, CPU),
        "clip_grad_norm": (MODEL, 1.0, 2.0),
    }


def failing(error: Exception) -> Strategy:
    class Failing(Ring):
        @hookimpl
        def wrap_model(self) -> Any:
            raise error

    return bound(Failing())


def test_a_wrap_that_fails_is_a_wrap_error_that_names_the_strategy() -> None:
    cause = RuntimeError("out of memory")
    with pytest.raises(WrapError) as caught:
        CALLS["wrap_model"](failing(cause))
    assert str(caught.value) == ("strategy 'ring' (pc-ring 1.0) failed to wrap the model: RuntimeError: out of memory")
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize("error", [WrapError("needs a GPU"), StateDictError("no"), ParallelCoreError("odd")])
def test_an_error_of_the_package_from_a_wrap_is_handed_on(error: ParallelCoreError) -> None:
    with pytest.raises(ParallelCoreError) as caught:
        CALLS["wrap_model"](failing(error))
    assert caught.value is error


def test_a_strategy_is_told_by_name_distribution_and_version() -> None:
    strategy = bound(Ring())
    assert (strategy.name, strategy.distribution, strategy.version) == ("ring", "pc-ring", "1.0")
    assert str(strategy) == "'ring' (pc-ring 1.0)"
    assert repr(strategy) == "<Strategy 'ring' (pc-ring 1.0)>"


def test_a_strategy_crosses_to_another_process_by_its_name(install_strategy: Install) -> None:
    install_strategy("ring")
    assert pickle.loads(pickle.dumps(bound_strategy("ring"))) is bound_strategy("ring")


def test_a_strategy_is_bound_once(install_strategy: Install) -> None:
    install_strategy("ring")
    assert bound_strategy("ring") is bound_strategy("ring")


def test_strategies_do_not_see_each_others_settings(install_strategy: Install) -> None:
    install_strategy("ring", settings="every: int = 8")
    install_strategy("mesh", settings="width: int = 4", distribution="pc-mesh")
    assert bound_strategy("ring").config_class.__struct_fields__ == ("every",)
    assert bound_strategy("mesh").config_class.__struct_fields__ == ("width",)


def test_a_strategy_that_breaks_the_contract_is_listed_with_its_error(install_strategy: Install) -> None:
    install_strategy("ring")
    install_strategy("half", "import parallel_core", distribution="pc-half")
    half, ring = available_strategies()
    assert ring.error is None
    assert str(half.error) == (
        "strategy 'half' (pc-half 1.0): strategy_config and wrap_model must be implemented, found no function marked "
        "with @hookimpl; add it to module fake_half_pc_half"
    )


def test_the_bare_model_is_answered_for_by_the_defaults() -> None:
    strategy = bare_model_strategy()
    assert strategy is bare_model_strategy()
    assert strategy.config_class is StrategyConfig
    assert strategy.wrap_model(MODEL, CONFIG, CPU) is MODEL
    assert strategy.data_parallel(MODEL) == (0, 1)
    assert strategy.plan_units(MODEL, CONFIG) == []
    assert strategy.check_model(MODEL, CONFIG, CPU) == []


def test_the_defaults_serve_parameters_that_became_dtensors_in_place(ranks: Ranks) -> None:
    def work() -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        for module in model:
            for name, parameter in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        for parameter in model.parameters():
            parameter.grad = distribute_tensor(torch.ones(parameter.shape), mesh, [Shard(0)])
        norm = clip_grad_norm(model, 1.0)
        optimizer.step()
        full, sharded = model_state_dict(model), model_state_dict(model, "sharded")
        momentum = optimizer_state_dict(model, optimizer)
        results: dict[str, Any] = {
            "norm": (type(norm).__name__, norm.item() ** 2),
            "sharded": [type(value).__name__ for value in sharded.values()],
            "full": all(torch.allclose(value, expected[name] - 13**-0.5, atol=1e-6) for name, value in full.items()),
            "shapes": [tuple(value["momentum_buffer"].shape) for value in momentum.get("state", {}).values()],
            "share": data_parallel(model),
        }
        optimizer.step()
        load_model_state_dict(model, full)
        load_optimizer_state_dict(model, optimizer, momentum)
        again = model_state_dict(model)
        results["loaded"] = all(torch.equal(again[name], full[name]) for name in full)
        kept = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
        results["placed"] = [type(value).__name__ for value in kept]
        return results

    first, second = ranks(work)
    assert first["norm"] == second["norm"] == ("Tensor", pytest.approx(13))
    assert first["shapes"] == [(3, 2), (3,), (1, 3), (1,)]
    for results in (first, second):
        assert results["sharded"] == results["placed"] == ["DTensor"] * 4
        assert results["full"]
        assert results["loaded"]
    assert (first["share"], second["share"]) == ((0, 2), (1, 2))


def test_a_bare_model_trains_without_scaling_and_without_anything_to_synchronise() -> None:
    model = nn.Linear(2, 2)
    scaler = grad_scaler(model)
    assert not scaler.is_enabled()
    assert not grad_scaler(nn.Tanh()).is_enabled()
    with no_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    expected = torch.cat([gradient.flatten() for gradient in gradients])
    assert clip_grad_norm(model, 0.5).item() == pytest.approx(expected.norm().item())
    assert clip_grad_norm(model, 100.0).item() == pytest.approx(0.5, abs=1e-4)
    assert clip_grad_norm(model, 100.0, float("inf")).item() == pytest.approx(0.5 / expected.norm().item(), abs=1e-4)
