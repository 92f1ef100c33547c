"""Binding refuses, when a strategy is named, what would otherwise fail in the middle of a training run or never."""

# mypy: disable-error-code="override, empty-body, misc"
# The strategies below make the mistakes that mypy would find, were it asked.

from __future__ import annotations

import functools
import importlib.metadata
import types
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from parallel_core import StrategyConfig, hookimpl
from parallel_core.binding import bind
from parallel_core.errors import StrategyError
from parallel_core.hookspecs import ENTRY_POINT_GROUP
from parallel_core.registry import Registration
from parallel_core.strategy import Strategy, available_strategies, bound_strategy

HOOKS = (
    "strategy_config, applies, plan_units, check_model, wrap_model, wrap_meta_model, wrap_optimizer, settle, "
    "model_state_dict, load_model_state_dict, optimizer_state_dict, load_optimizer_state_dict, "
    "local_shards, clip_grad_norm, no_sync, has_unsynchronised_gradients, grad_scaler, data_parallel"
)


class RingConfig(StrategyConfig):
    every: int = 8


class Ring:
    """The smallest strategy; each test makes its mistake in a subclass."""

    @hookimpl
    def strategy_config(self) -> type[StrategyConfig]:
        return RingConfig

    @hookimpl
    def wrap_model(self, model: Any, config: Any, device: Any) -> Any:
        return ("wrapped", model, config, device)


def registration(name: str = "ring") -> Registration:
    entry_point = importlib.metadata.EntryPoint(name, "pc_ring:plugin", ENTRY_POINT_GROUP)
    return Registration(name, "pc-ring", "1.0", entry_point)


def bound(plugin: object) -> Any:
    return bind(registration(), plugin)


def refusal(plugin: object) -> str:
    with pytest.raises(StrategyError) as caught:
        Strategy(registration(), plugin)
    text = str(caught.value)
    assert text.startswith("strategy 'ring' (pc-ring 1.0): ")
    assert not text.endswith(".")
    return text.removeprefix("strategy 'ring' (pc-ring 1.0): ")


def module_of(*functions: Callable[..., Any], name: str = "pc_ring") -> types.ModuleType:
    module = types.ModuleType(name)
    for function in functions:
        vars(module)[function.__name__] = function
    return module


def test_an_object_is_bound() -> None:
    assert bound(Ring()).wrap_model(model=1, config=2, device=3) == ("wrapped", 1, 2, 3)
    assert bound(Ring()).strategy_config() is RingConfig


def test_a_module_is_bound() -> None:
    @hookimpl
    def strategy_config() -> type[StrategyConfig]:
        return RingConfig

    @hookimpl
    def wrap_model(model: Any) -> Any:
        return model

    assert bound(module_of(strategy_config, wrap_model)).wrap_model(model=1, config=2, device=3) == 1


def test_what_a_strategy_leaves_out_is_answered_by_the_defaults() -> None:
    hooks = bound(Ring())
    assert hooks.applies(world_size=1, device=None) is False
    assert hooks.applies(world_size=2, device=None) is True
    assert hooks.plan_units(model=None, config=None) == []
    assert hooks.check_model(model=None, config=None, device=None) == []
    assert hooks.wrap_optimizer(model=None, optimizer="mine", config=None) == "mine"


def test_a_hook_that_the_strategy_answers_is_never_also_answered_by_the_defaults() -> None:
    """With firstresult, pluggy goes on after an answer of None."""

    class Silent(Ring):
        @hookimpl
        def wrap_optimizer(self) -> None:
            return None

        @hookimpl
        def applies(self) -> None:
            return None

    hooks = bound(Silent())
    assert hooks.wrap_optimizer(model=None, optimizer="mine", config=None) is None
    assert hooks.applies(world_size=8, device=None) is None
    for hook in ("wrap_optimizer", "applies", "wrap_model", "strategy_config"):
        assert len(getattr(hooks, hook).get_hookimpls()) == 1
    assert [found.plugin_name for found in hooks.applies.get_hookimpls()] == ["ring"]


def test_every_hook_has_one_implementation() -> None:
    hooks = bound(Ring())
    for hook in HOOKS.split(", "):
        assert len(getattr(hooks, hook).get_hookimpls()) == 1


def test_an_implementation_may_take_fewer_arguments_in_any_order() -> None:
    class Few(Ring):
        @hookimpl
        def wrap_model(self, device: Any, model: Any) -> Any:
            return device, model

        @hookimpl
        def applies(self) -> bool:
            return True

    hooks = bound(Few())
    assert hooks.wrap_model(model="m", config="c", device="d") == ("d", "m")
    assert hooks.applies(world_size=1, device="d") is True


def test_an_argument_with_a_default_is_passed_all_the_same() -> None:
    class Defaulted(Ring):
        @hookimpl
        def wrap_model(self, model: Any, config: Any = None) -> Any:
            return model, config

    assert bound(Defaulted()).wrap_model(model="m", config="c", device="d") == ("m", "c")


def test_static_and_class_methods_are_implementations() -> None:
    class Methods(Ring):
        @staticmethod
        @hookimpl
        def applies(world_size: int) -> bool:
            return world_size == 3

        @classmethod
        @hookimpl
        def wrap_model(cls, model: Any) -> Any:
            return cls.__name__, model

    hooks = bound(Methods())
    assert hooks.applies(world_size=3, device=None) is True
    assert hooks.wrap_model(model=1, config=2, device=3) == ("Methods", 1)


def test_an_implementation_may_bear_another_name() -> None:
    class Renamed(Ring):
        @hookimpl(specname="applies")
        def wants_to(self) -> bool:
            return True

    assert bound(Renamed()).applies(world_size=1, device=None) is True


def test_a_context_manager_function_is_an_implementation() -> None:
    class Quiet(Ring):
        @hookimpl
        @contextmanager
        def no_sync(self, model: Any) -> Iterator[None]:
            seen.append(model)
            yield

    seen: list[Any] = []
    with bound(Quiet()).no_sync(model="m"):
        assert seen == ["m"]


def test_a_wrapper_goes_around_an_own_implementation() -> None:
    class Around(Ring):
        @hookimpl(wrapper=True, specname="wrap_model")
        def watch(self, model: Any) -> Any:
            answer = yield
            return ("watched", model, answer)

    assert bound(Around()).wrap_model(model=1, config=2, device=3) == ("watched", 1, ("wrapped", 1, 2, 3))


def test_a_wrapper_goes_around_a_default() -> None:
    class Around(Ring):
        @hookimpl(wrapper=True)
        def applies(self, world_size: int) -> Any:
            return not (yield)

    assert bound(Around()).applies(world_size=2, device=None) is False
    assert bound(Around()).applies(world_size=1, device=None) is True


def test_an_old_wrapper_goes_around_a_default() -> None:
    class Around(Ring):
        @hookimpl(hookwrapper=True)
        def applies(self) -> Any:
            outcome = yield
            outcome.force_result("mine")

    assert bound(Around()).applies(world_size=2, device=None) == "mine"


def test_a_wrapper_alone_does_not_answer_a_required_hook() -> None:
    class Around:
        strategy_config = Ring.strategy_config

        @hookimpl(wrapper=True)
        def wrap_model(self) -> Any:
            return (yield)

    assert refusal(Around()) == (
        "wrap_model must be implemented, found only ['strategy_config']; add it to an object of "
        "test_a_wrapper_alone_does_not_answer_a_required_hook.<locals>.Around; a wrapper goes around one, and is none"
    )


def test_strategies_in_one_process_do_not_see_each_other() -> None:
    class Other(Ring):
        @hookimpl
        def applies(self) -> bool:
            return True

        @hookimpl(wrapper=True, specname="wrap_model")
        def watch(self) -> Any:
            yield
            return "other's"

    first, second = bound(Ring()), bind(registration("other"), Other())
    assert first.applies(world_size=1, device=None) is False
    assert second.applies(world_size=1, device=None) is True
    assert first.wrap_model(model=1, config=2, device=3) == ("wrapped", 1, 2, 3)
    assert second.wrap_model(model=1, config=2, device=3) == "other's"


def test_a_strategy_may_bear_any_valid_name() -> None:
    assert bind(registration("defaults"), Ring()).applies(world_size=2, device=None) is True


def test_a_misspelt_hook_is_refused() -> None:
    class Misspelt(Ring):
        @hookimpl
        def wrap_modell(self, model: Any) -> Any:
            return model

    assert refusal(Misspelt()) == (
        "there is no hook 'wrap_modell', as which wrap_modell(model: 'Any') -> 'Any' is marked; "
        f"hooks are {HOOKS}; did you mean 'wrap_model'?"
    )


def test_a_misspelt_specname_is_refused() -> None:
    class Misspelt(Ring):
        @hookimpl(specname="aplies")
        def wants_to(self) -> bool:
            return True

    assert refusal(Misspelt()).startswith("there is no hook 'aplies', as which wants_to() -> 'bool' is marked; ")


def test_a_misspelt_optional_hook_is_refused_too() -> None:
    """pluggy's `optionalhook` is for hooks of other versions; a strategy says in its metadata which core it needs."""

    class Misspelt(Ring):
        @hookimpl(optionalhook=True)
        def no_sink(self) -> Any: ...

    assert refusal(Misspelt()).startswith("there is no hook 'no_sink', ")


def test_a_function_that_is_named_like_a_hook_and_not_marked_is_refused() -> None:
    class Unmarked(Ring):
        def applies(self, world_size: int) -> bool:
            return True

    assert refusal(Unmarked()) == (
        "applies(world_size: 'int') -> 'bool' bears the name of a hook and is not marked; put @hookimpl above it, or "
        "rename it"
    )


def test_an_unmarked_function_of_a_module_is_refused() -> None:
    def clip_grad_norm(model: Any, max_norm: float) -> Any: ...

    clip_grad_norm.__module__ = "pc_ring.clipping"
    plugin = module_of(Ring.strategy_config, Ring.wrap_model, clip_grad_norm)
    assert refusal(plugin).startswith(
        "clip_grad_norm(model: 'Any', max_norm: 'float') -> 'Any' bears the name of a hook"
    )


def test_a_verb_that_a_module_imported_is_not_taken_for_a_hook() -> None:
    @hookimpl
    def strategy_config() -> type[StrategyConfig]:
        return RingConfig

    @hookimpl
    def wrap_model(model: Any) -> Any:
        return model

    from parallel_core import clip_grad_norm, no_sync

    assert (
        bound(module_of(strategy_config, wrap_model, clip_grad_norm, no_sync)).applies(world_size=2, device=0) is True
    )


def test_a_marked_object_that_pluggy_does_not_take_for_a_function_is_refused() -> None:
    class Cached(Ring):
        @hookimpl
        @functools.cache  # noqa: B019  # the mistake
        def data_parallel(self) -> tuple[int, int]:
            return 0, 1

    assert refusal(Cached()) == (
        "data_parallel is a _lru_cache_wrapper, which is never called as a hook; write a plain function"
    )


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (["strategy_config"], "wrap_model must be implemented, found only ['strategy_config']"),
        (["wrap_model"], "strategy_config must be implemented, found only ['wrap_model']"),
        ([], "strategy_config and wrap_model must be implemented, found no function marked with @hookimpl"),
    ],
)
def test_a_missing_required_hook_is_refused(kept: list[str], message: str) -> None:
    plugin = type("Half", (), {name: vars(Ring)[name] for name in kept})()
    assert refusal(plugin) == f"{message}; add it to an object of Half"
    module = module_of()
    if not kept:
        assert refusal(module) == f"{message}; add it to module pc_ring"


def test_an_argument_that_the_hook_lacks_is_refused() -> None:
    class Wrong(Ring):
        @hookimpl
        def wrap_model(self, model: Any, confg: Any) -> Any: ...

    assert refusal(Wrong()) == (
        "wrap_model(model: 'Any', confg: 'Any') -> 'Any' has the argument 'confg', which the hook lacks; did you mean "
        "'config'?; write wrap_model(model, config, device)"
    )


def test_an_argument_with_a_default_that_the_hook_lacks_is_refused() -> None:
    class Wrong(Ring):
        @hookimpl
        def applies(self, world_size: int, zone: int = 0) -> bool: ...

    assert refusal(Wrong()) == (
        "applies(world_size: 'int', zone: 'int' = 0) -> 'bool' has the argument 'zone', which the hook lacks; "
        "write applies(world_size, device)"
    )


def test_a_keyword_only_argument_is_refused() -> None:
    class Wrong(Ring):
        @hookimpl
        def wrap_model(self, model: Any, *, config: Any) -> Any: ...

    assert refusal(Wrong()) == (
        "wrap_model(model: 'Any', *, config: 'Any') -> 'Any' has the keyword-only argument 'config', which is never "
        "passed; write wrap_model(model, config, device)"
    )


def test_variable_arguments_are_refused() -> None:
    class Positional(Ring):
        @hookimpl
        def applies(self, *args: Any) -> bool: ...

    class Keywords(Ring):
        @hookimpl
        def applies(self, world_size: int, **kwargs: Any) -> bool: ...

    assert refusal(Positional()) == (
        "applies(*args: 'Any') -> 'bool' has the argument *args, which is never passed; "
        "write applies(world_size, device)"
    )
    assert refusal(Keywords()) == (
        "applies(world_size: 'int', **kwargs: 'Any') -> 'bool' has the argument **kwargs, which is never passed; "
        "write applies(world_size, device)"
    )


def test_a_wrapper_with_an_argument_that_the_hook_lacks_is_refused() -> None:
    class Wrong(Ring):
        @hookimpl(wrapper=True)
        def applies(self, size: int) -> Any:
            return (yield)

    assert "has the argument 'size', which the hook lacks" in refusal(Wrong())


def test_a_generator_in_place_of_a_context_manager_is_refused() -> None:
    class Generator(Ring):
        @hookimpl
        def no_sync(self, model: Any) -> Iterator[None]:
            yield

    assert refusal(Generator()) == (
        "no_sync(model: 'Any') -> 'Iterator[None]' is a generator, expected a function that returns; put "
        "@contextmanager under @hookimpl if it is to be one"
    )


def test_a_coroutine_is_refused() -> None:
    class Coroutine(Ring):
        @hookimpl
        async def wrap_model(self, model: Any) -> Any: ...

    class AsyncGenerator(Ring):
        @hookimpl
        async def no_sync(self) -> AsyncIterator[None]:
            yield

    assert refusal(Coroutine()) == (
        "wrap_model(model: 'Any') -> 'Any' is a coroutine, expected a plain function; remove `async`"
    )
    assert refusal(AsyncGenerator()) == (
        "no_sync() -> 'AsyncIterator[None]' is a coroutine, expected a plain function; remove `async`"
    )


def test_a_wrapper_that_does_not_yield_is_refused() -> None:
    class NoYield(Ring):
        @hookimpl(wrapper=True)
        def applies(self, world_size: int) -> Any:
            return True

    assert refusal(NoYield()) == (
        "Plugin 'ring' for hook 'applies' hookimpl definition: applies(world_size: 'int') -> 'Any' Declared as "
        "wrapper=True or hookwrapper=True but function is not a generator function"
    )


def test_a_wrapper_of_both_kinds_is_refused() -> None:
    class Both(Ring):
        @hookimpl(wrapper=True, hookwrapper=True)
        def applies(self) -> Any:
            yield

    assert refusal(Both()) == (
        "Plugin 'ring' for hook 'applies' hookimpl definition: applies() -> 'Any' The wrapper=True and "
        "hookwrapper=True options are mutually exclusive"
    )


def test_two_implementations_of_one_hook_are_refused() -> None:
    class Twice(Ring):
        @hookimpl(specname="wrap_model")
        def wrap_too(self, model: Any) -> Any: ...

    assert refusal(Twice()) == "hook 'wrap_model' is implemented twice, by wrap_model and wrap_too; keep one"


def test_a_class_in_place_of_an_instance_is_refused() -> None:
    assert refusal(Ring) == (
        "'pc_ring:plugin' is the class Ring, expected a module or an instance; let the entry point name an object made "
        "from it"
    )


@pytest.mark.parametrize("plugin", [None, 3, "ring", len])
def test_what_is_no_plugin_at_all_is_refused(plugin: object) -> None:
    assert refusal(plugin) == (
        "strategy_config and wrap_model must be implemented, found no function marked with @hookimpl; "
        f"add it to an object of {type(plugin).__name__}"
    )


def with_config(answer: Any) -> object:
    class Configured(Ring):
        @hookimpl
        def strategy_config(self) -> Any:
            return answer() if isinstance(answer, types.FunctionType) else answer

    return Configured()


class Listed(StrategyConfig):
    names: list[str] = []  # the mistake


class Required(StrategyConfig):
    every: int


class Clashing(StrategyConfig):
    strategy: str = "x"


class NotOurs:
    pass


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "expected a subclass of parallel_core.StrategyConfig, found None"),
        (NotOurs, f"expected a subclass of parallel_core.StrategyConfig, found {NotOurs!r}"),
        (
            RingConfig(),
            "expected a subclass of parallel_core.StrategyConfig, found RingConfig(every=8); return the class itself",
        ),
        (dict, "expected a subclass of parallel_core.StrategyConfig, found <class 'dict'>"),
        (Required, "Required.every has no default; give it one, so that a config file may leave it out"),
    ],
)
def test_a_config_class_of_the_wrong_kind_is_refused(answer: Any, message: str) -> None:
    assert refusal(with_config(answer)) == f"hook strategy_config: {message}"


def test_a_field_that_cannot_be_hashed_is_refused() -> None:
    text = refusal(with_config(Listed))
    assert text.startswith("hook strategy_config: Listed.names: ")
    assert "tuple" in text


def test_a_field_that_becomes_one_of_the_cores_is_refused() -> None:
    """`parallel` + `strategy` would be the setting that names the strategy."""
    with pytest.raises(StrategyError) as caught:
        Strategy(registration("parallel"), with_config(Clashing))
    assert str(caught.value) == (
        "strategy 'parallel' (pc-ring 1.0): hook strategy_config: Clashing.strategy: its name in a config file, "
        "'parallel_strategy', is the core's own"
    )


def test_all_that_is_wrong_with_a_config_class_is_listed() -> None:
    class Both(StrategyConfig):
        names: dict[str, int] = {}  # the mistake
        every: int

    text = refusal(with_config(Both))
    assert "Both.names" in text
    assert "Both.every has no default" in text


def test_a_config_hook_that_fails_is_the_strategys_error() -> None:
    def fails() -> Any:
        raise LookupError("no table")

    with pytest.raises(StrategyError) as caught:
        Strategy(registration(), with_config(fails))
    assert str(caught.value) == "strategy 'ring' (pc-ring 1.0): hook strategy_config failed: LookupError: no table"
    assert isinstance(caught.value.__cause__, LookupError)


class NoYield(Ring):
    @hookimpl(wrapper=True)
    def applies(self) -> Any:
        return True


class BrokenProperty(Ring):
    @property
    def wrap_optimizer(self) -> Any:
        raise RuntimeError("not yet")


def test_a_property_in_place_of_a_hook_is_refused_without_being_read() -> None:
    assert refusal(BrokenProperty()) == (
        "wrap_optimizer is a property, which is never called as a hook; write a plain function"
    )


@pytest.mark.parametrize(
    "plugin", [Ring, None, NoYield(), BrokenProperty()], ids=["class", "nothing", "no yield", "property"]
)
def test_a_plugin_that_cannot_be_bound_leaves_the_others_working(
    install_strategy: Callable[..., str], plugin: object
) -> None:
    install_strategy("ring")
    install_strategy("odd", plugin or types.SimpleNamespace(), distribution="pc-odd")
    odd, ring = available_strategies()
    assert ring.error is None
    assert str(odd.error).startswith("strategy 'odd' (pc-odd 1.0): ")
    assert bound_strategy("ring").name == "ring"
