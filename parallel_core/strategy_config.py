"""The settings of one strategy: a struct whose instances are valid, whichever way they come about."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any, dataclass_transform

import msgspec

from parallel_core.conversion import MismatchError, convert
from parallel_core.errors import ConfigError, StrategyError, did_you_mean
from parallel_core.field_types import type_problem

__all__ = [
    "CORE_FIELDS",
    "StrategyConfig",
    "ValidatedMeta",
    "ValidatedStruct",
    "config_class_problems",
    "field_types_of",
]

#: The settings of the core. They stand beside the strategies' in a config file, so no strategy can have one of them.
CORE_FIELDS = ("parallel_strategy", "backend", "timeout_seconds")

_FIELD_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(msgspec.field,))
class ValidatedMeta(msgspec.StructMeta):
    """Makes every subclass frozen, of keyword arguments only, and closed to unknown ones.

    msgspec hands down the first and the last of these to subclasses, but neither the second nor any check of what a
    constructor is given.
    """

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> ValidatedMeta:
        if options:
            raise StrategyError(f"{name}: expected a class without options, found {', '.join(options)}; remove them")
        return super().__new__(mcls, name, bases, namespace, frozen=True, kw_only=True, forbid_unknown_fields=True)

    def __call__(cls, *positional: object, **given: object) -> Any:
        if positional:
            raise ConfigError(f"{cls.__name__}: expected keyword arguments only, found {len(positional)} positional")
        cls._check_given(given)  # type: ignore[attr-defined]  # of ValidatedStruct, which every class here is
        return super().__call__(**given)


class ValidatedStruct(msgspec.Struct, metaclass=ValidatedMeta):
    """What `StrategyConfig` and `DistributedConfig` have in common: checked by constructor, `replace` and `convert`."""

    def __init_subclass__(cls) -> None:
        if cls.__post_init__ is not ValidatedStruct.__post_init__:
            raise StrategyError(
                f"{cls.__name__} defines __post_init__, which would take the place of the validation; "
                "define problems(self) -> Iterable[str] for rules across fields"
            )

    def problems(self) -> Iterable[str]:
        """Return what is wrong across fields, a sentence each; called when every field by itself is right."""
        return ()

    @classmethod
    def _check_given(cls, given: dict[str, object]) -> None:
        """Refuse unknown names, and then wrong values with them, so that one error says all."""
        types = field_types_of(cls)
        unknown = [f"{name}: {_unknown_text(cls.__name__, name, types)}" for name in given if name not in types]
        if unknown:
            known = {name: value for name, value in given.items() if name in types}
            raise ConfigError(unknown + _convert_all(known, types)[1])

    def __post_init__(self) -> None:
        types = field_types_of(type(self))
        converted, problems = _convert_all({name: getattr(self, name) for name in types}, types)
        if problems:
            raise ConfigError(problems)
        for name, value in converted.items():
            msgspec.structs.force_setattr(self, name, value)
        if problems := _listed(type(self).__name__, self.problems()):
            raise ConfigError(problems)


class StrategyConfig(ValidatedStruct):
    """The base of every strategy's settings: a field for each, with a type and a default.

        class MyConfig(StrategyConfig):
            every: Annotated[int, msgspec.Meta(ge=1, description="steps between two averagings")] = 8

    Instances are immutable, and can be compared, hashed and pickled. Every one is valid: the constructor,
    `msgspec.structs.replace` and `msgspec.convert` check each field strictly and then the rules of `problems`, which
    a subclass may define. In `DistributedConfig` the fields carry the strategy's name before their own.

    Raises:
        ConfigError: what was given is not valid; all that is wrong is listed. What `replace` and `convert` refuse by
            themselves is an error of msgspec's: a name that is no field, and by `convert` a wrong value.
    """

    def lost_if_declined(self) -> Iterable[str]:
        """Return the fields that ask for something which the bare model lacks, for the warning that says so.

        When: the strategy does not apply (hook `applies`) and the model stays as it is.
        Returns: names without the strategy's prefix; by default none.
        """
        return ()


@functools.cache  # msgspec evaluates the annotations anew each time
def field_types_of(config_class: type[ValidatedStruct]) -> dict[str, Any]:
    """Return the type of each field, by its name."""
    return {field.name: field.type for field in msgspec.structs.fields(config_class)}


def config_class_problems(found: object, *, strategy_name: str) -> list[str]:
    """Return what is wrong with what a strategy's hook `strategy_config` has returned, a sentence each.

    Args:
        found: what the hook has returned.
        strategy_name: the strategy's name, the prefix that its fields get in `DistributedConfig`.
    """
    if not (isinstance(found, type) and issubclass(found, StrategyConfig)):
        hint = "; return the class itself" if isinstance(found, StrategyConfig) else ""
        return [f"expected a subclass of parallel_core.StrategyConfig, found {found!r}{hint}"]
    try:
        fields = msgspec.structs.fields(found)
    except (NameError, TypeError, AttributeError) as error:
        return [f"the types of {found.__name__} can't be read: {error}; import what they name outside TYPE_CHECKING"]
    problems = []
    for field in fields:
        where = f"{found.__name__}.{field.name}"
        if not _FIELD_NAME.fullmatch(field.name):
            problems.append(f"{where}: allowed in a name are lower-case letters, digits and _, a letter first")
        if hasattr(StrategyConfig, field.name):
            problems.append(f"{where}: StrategyConfig has a method of this name; rename the field")
        if f"{strategy_name}_{field.name}" in CORE_FIELDS:
            problems.append(f"{where}: its name in a config file, '{strategy_name}_{field.name}', is the core's own")
        if problem := type_problem(field.type):
            problems.append(f"{where}: {problem}")
        if field.default is msgspec.NODEFAULT and field.default_factory is msgspec.NODEFAULT:
            problems.append(f"{where} has no default; give it one, so that a config file may leave it out")
    return problems or _default_problems(found)


def _default_problems(config_class: type[StrategyConfig]) -> list[str]:
    try:
        hash(config_class())
    except ConfigError as error:
        return [f"the defaults of {config_class.__name__} are not valid: {problem}" for problem in error.problems]
    except Exception as error:
        # An author's `problems`, default factory or enum can raise whatever it likes; that is this strategy's error.
        return [f"{config_class.__name__}() failed: {type(error).__name__}: {error}"]
    return []


def _convert_all(values: dict[str, object], types: dict[str, Any]) -> tuple[dict[str, object], list[str]]:
    converted, problems = {}, []
    for name, value in values.items():
        try:
            converted[name] = convert(value, types[name])
        except MismatchError as error:
            problems.append(f"{name}: {error}")
    return converted, problems


def _unknown_text(owner: str, name: str, known: Iterable[str]) -> str:
    names = ", ".join(map(repr, known))
    allowed = f"its settings are {names}" if names else "it has no settings"
    return f"unknown setting of {owner}; {allowed}{did_you_mean(name, known)}"


def _listed(owner: str, problems: object) -> list[str]:
    # A string is an iterable of strings too, one for each character.
    if isinstance(problems, Iterable) and not isinstance(problems, str):
        listed = list(problems)
        if all(isinstance(problem, str) for problem in listed):
            return listed
    raise StrategyError(f"{owner}.problems must return a list of strings, found {problems!r}")
