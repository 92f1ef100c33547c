"""A strategy's settings are valid whichever way they come about, and a class that can't be one is refused."""

from __future__ import annotations

import copy
import enum
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from parallel_core.errors import ConfigError, StrategyError
from parallel_core.strategy_config import StrategyConfig, config_class_problems

if TYPE_CHECKING:
    from decimal import Decimal


class When(enum.Enum):
    START = "start"
    END = "end"


class AveragingConfig(StrategyConfig):
    every: Annotated[int, Meta(ge=1, description="steps between two averagings")] = 8
    warm_up: int = 4
    rate: float = 0.5
    mode: Literal["mean", "sum"] = "mean"
    when: When = When.END
    skip: tuple[str, ...] = ()

    def problems(self) -> Iterator[str]:
        if self.warm_up > self.every * 100:
            yield f"warm_up must be at most 100 times every ({self.every}), found {self.warm_up}"


class LongerConfig(AveragingConfig):
    twice: bool = False


def test_a_config_is_made_of_keyword_arguments_and_defaults() -> None:
    config = LongerConfig(every=2, twice=True)
    assert (config.every, config.warm_up, config.twice) == (2, 4, True)
    assert repr(config) == (
        "LongerConfig(every=2, warm_up=4, rate=0.5, mode='mean', when=<When.END: 'end'>, skip=(), twice=True)"
    )


def test_what_a_file_can_hold_becomes_what_the_type_says() -> None:
    given: dict[str, Any] = {"rate": 1, "when": "start", "skip": ["norm"]}
    config = AveragingConfig(**given)
    assert (config.rate, config.when, config.skip) == (1.0, When.START, ("norm",))
    assert isinstance(config.rate, float)


def by_constructor(config: AveragingConfig, changes: dict[str, Any]) -> AveragingConfig:
    return type(config)(**changes)


def by_replace(config: AveragingConfig, changes: dict[str, Any]) -> AveragingConfig:
    return msgspec.structs.replace(config, **changes)


def by_copy_replace(config: AveragingConfig, changes: dict[str, Any]) -> AveragingConfig:
    replaced: AveragingConfig = type(config).__replace__(config, **changes)  # what copy.replace of Python 3.13 calls
    return replaced


def by_convert(config: AveragingConfig, changes: dict[str, Any]) -> AveragingConfig:
    return msgspec.convert(changes, type(config))


every_door = pytest.mark.parametrize("door", [by_constructor, by_replace, by_copy_replace, by_convert])
Door = Callable[[AveragingConfig, dict[str, Any]], AveragingConfig]


@every_door
@pytest.mark.parametrize("config", [AveragingConfig(), LongerConfig()])
def test_every_door_converts(door: Door, config: AveragingConfig) -> None:
    assert door(config, {"skip": ["norm"]}) == type(config)(skip=("norm",))


@every_door
@pytest.mark.parametrize("config", [AveragingConfig(), LongerConfig()])
@pytest.mark.parametrize("changes", [{"every": 0}, {"every": True}, {"rate": "1"}, {"mode": "max"}, {"skip": "norm"}])
def test_every_door_refuses_a_value_that_does_not_fit(
    door: Door, config: AveragingConfig, changes: dict[str, Any]
) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError)):
        door(config, changes)


@every_door
@pytest.mark.parametrize("config", [AveragingConfig(), LongerConfig()])
def test_every_door_checks_the_rules_across_fields(door: Door, config: AveragingConfig) -> None:
    with pytest.raises(ConfigError) as refused:
        door(config, {"every": 1, "warm_up": 101})
    assert str(refused.value) == "warm_up must be at most 100 times every (1), found 101"


@every_door
def test_every_door_refuses_not_a_number(door: Door) -> None:
    with pytest.raises(ConfigError) as refused:
        door(AveragingConfig(), {"rate": float("nan")})
    assert str(refused.value) == "rate: expected a number, found nan; a setting is a finite number"


def test_one_error_lists_all_that_is_wrong() -> None:
    given: dict[str, Any] = {"evry": 3, "every": 0, "mode": "Sum", "skip": ["a", 1], "rate": 2}
    with pytest.raises(ConfigError) as refused:
        AveragingConfig(**given)
    assert refused.value.problems == (
        (
            "evry: unknown setting of AveragingConfig; its settings are "
            "'every', 'warm_up', 'rate', 'mode', 'when', 'skip'; did you mean 'every'?"
        ),
        "every: expected an integer >= 1, found 0",
        "mode: expected 'mean' or 'sum', found 'Sum'; did you mean 'sum'?",
        "skip: expected a list of strings, found ['a', 1]",
    )


def test_positional_arguments_are_refused() -> None:
    make: Any = AveragingConfig
    with pytest.raises(ConfigError) as refused:
        make(8, 4)
    assert str(refused.value) == "AveragingConfig: expected keyword arguments only, found 2 positional"


def test_an_unknown_setting_of_a_strategy_without_settings_says_so() -> None:
    make: Any = StrategyConfig
    with pytest.raises(ConfigError) as refused:
        make(every=8)
    assert str(refused.value) == "every: unknown setting of StrategyConfig; it has no settings"


def test_a_config_is_immutable_comparable_and_hashable() -> None:
    config: Any = LongerConfig(every=3)
    with pytest.raises(AttributeError):
        config.every = 4
    assert config == LongerConfig(every=3) != LongerConfig(every=4)
    assert {config, LongerConfig(every=3)} == {config}
    assert LongerConfig() != AveragingConfig()


@pytest.mark.parametrize("again", [lambda config: pickle.loads(pickle.dumps(config)), copy.copy, copy.deepcopy])
def test_a_config_is_the_same_after_pickling_and_copying(again: Callable[[object], object]) -> None:
    config = LongerConfig(every=3, when=When.START, skip=("norm",))
    assert again(config) == config


def test_rules_may_be_given_as_any_iterable_of_strings_and_nothing_else() -> None:
    class TextConfig(StrategyConfig):
        answer: int = 0

        def problems(self) -> Any:
            return [(), ["wrong"], "wrong", None, [1]][self.answer]

    TextConfig()
    with pytest.raises(ConfigError, match=r"^wrong$"):
        TextConfig(answer=1)
    for answer, found in ((2, "'wrong'"), (3, "None"), (4, r"\[1\]")):
        with pytest.raises(
            StrategyError, match=rf"^TextConfig\.problems must return a list of strings, found {found}$"
        ):
            TextConfig(answer=answer)


def test_a_class_with_a_post_init_of_its_own_is_refused() -> None:
    message = (
        "{} defines __post_init__, which would take the place of the validation; "
        "define problems(self) -> Iterable[str] for rules across fields"
    )
    with pytest.raises(StrategyError) as refused:

        class PostConfig(LongerConfig):
            def __post_init__(self) -> None: ...

    assert str(refused.value) == message.format("PostConfig")

    class Mixin:
        def __post_init__(self) -> None: ...

    with pytest.raises(StrategyError) as refused:

        class MixedConfig(Mixin, StrategyConfig):
            pass

    assert str(refused.value) == message.format("MixedConfig")


def test_class_options_are_refused() -> None:
    with pytest.raises(StrategyError) as refused:

        class RenamedConfig(StrategyConfig, rename="camel", tag=True):
            pass

    assert str(refused.value) == "RenamedConfig: expected a class without options, found rename, tag; remove them"


@pytest.mark.parametrize("config_class", [StrategyConfig, AveragingConfig, LongerConfig])
def test_a_right_class_has_no_problems(config_class: type) -> None:
    assert config_class_problems(config_class, strategy_name="timeout") == []


class Lenient(msgspec.Struct):
    every: int = 8


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (None, "expected a subclass of parallel_core.StrategyConfig, found None"),
        ({"every": 8}, "expected a subclass of parallel_core.StrategyConfig, found {'every': 8}"),
        (
            Lenient,
            f"expected a subclass of parallel_core.StrategyConfig, found <class '{__name__}.Lenient'>",
        ),
        (
            StrategyConfig(),
            "expected a subclass of parallel_core.StrategyConfig, found StrategyConfig(); return the class itself",
        ),
    ],
)
def test_what_is_no_config_class_is_refused(found: object, problem: str) -> None:
    assert config_class_problems(found, strategy_name="demo") == [problem]


def test_every_field_that_can_not_be_a_setting_is_named() -> None:
    class WrongConfig(StrategyConfig):
        none: int
        several: list[str] = msgspec.field(default_factory=list)
        Loud: int = 0
        _hidden: int = 0
        seconds: int = 0
        lost_if_declined: bool = False  # type: ignore[assignment]  # as an author might

    assert config_class_problems(WrongConfig, strategy_name="timeout") == [
        "WrongConfig.none has no default; give it one, so that a config file may leave it out",
        "WrongConfig.several: list[str] can't be hashed; use tuple[str, ...]",
        "WrongConfig.Loud: allowed in a name are lower-case letters, digits and _, a letter first",
        "WrongConfig._hidden: allowed in a name are lower-case letters, digits and _, a letter first",
        "WrongConfig.seconds: its name in a config file, 'timeout_seconds', is the core's own",
        "WrongConfig.lost_if_declined: StrategyConfig has a method of this name; rename the field",
    ]


def test_a_field_that_clashes_with_the_core_for_one_strategy_is_right_for_another() -> None:
    class PlainConfig(StrategyConfig):
        strategy: str = "a"

    assert config_class_problems(PlainConfig, strategy_name="demo") == []
    assert config_class_problems(PlainConfig, strategy_name="parallel") == [
        "PlainConfig.strategy: its name in a config file, 'parallel_strategy', is the core's own"
    ]


def test_a_type_that_is_imported_for_type_checkers_alone_is_named() -> None:
    class AbsentConfig(StrategyConfig):
        every: Decimal = 8  # type: ignore[assignment]  # never looked at

    (problem,) = config_class_problems(AbsentConfig, strategy_name="demo")
    assert problem == (
        "the types of AbsentConfig can't be read: name 'Decimal' is not defined; "
        "import what they name outside TYPE_CHECKING"
    )


def test_defaults_that_are_not_valid_are_named() -> None:
    class DefaultsConfig(StrategyConfig):
        every: Annotated[int, Meta(ge=1)] = 0
        mode: Literal["a", "b"] = "c"  # type: ignore[assignment]  # as an author might

    class RuleConfig(StrategyConfig):
        def problems(self) -> Iterable[str]:
            return ["never right"]

    class RaisingConfig(StrategyConfig):
        def problems(self) -> Iterable[str]:
            raise ZeroDivisionError("by zero")

    found = [config_class_problems(each, strategy_name="demo") for each in (DefaultsConfig, RuleConfig, RaisingConfig)]
    assert found == [
        [
            "the defaults of DefaultsConfig are not valid: every: expected an integer >= 1, found 0",
            "the defaults of DefaultsConfig are not valid: mode: expected 'a' or 'b', found 'c'",
        ],
        ["the defaults of RuleConfig are not valid: never right"],
        ["RaisingConfig() failed: ZeroDivisionError: by zero"],
    ]


def test_a_default_may_be_made_by_a_function() -> None:
    class MadeConfig(StrategyConfig):
        names: tuple[str, ...] = msgspec.field(default_factory=lambda: ("a",))

    assert config_class_problems(MadeConfig, strategy_name="demo") == []
    assert MadeConfig().names == ("a",)
