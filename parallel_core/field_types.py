"""The types that a setting may have, in words.

A setting is what a person can write in a config file: true or false, a number, a string, one of a few names, nothing,
or a list of these. In Python a list is a tuple, so that a config can be compared, hashed and sent to another process.
"""

from __future__ import annotations

import types
from enum import Enum, EnumMeta
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

__all__ = ["choices_of", "describe_type", "leaves_of", "type_problem"]

_WORDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string", types.NoneType: "null"}
_PLURALS = {int: "integers", float: "numbers", str: "strings"}
_LIMITS = {
    "gt": " > {:_}",
    "ge": " >= {:_}",
    "lt": " < {:_}",
    "le": " <= {:_}",
    "multiple_of": " divisible by {:_}",
    "min_length": " of length >= {}",
    "max_length": " of length <= {}",
    "pattern": " that matches {!r}",
}


def describe_type(annotation: Any) -> str:
    """Return the type of a setting in words: `an integer >= 0`, `a list of strings`, `'a' or 'b'`."""
    bare, limits = _unwrap(annotation)
    if bare in _WORDS:
        return _WORDS[bare] + limits
    if choices := choices_of(bare):
        return _one_of(choices)
    if get_origin(bare) is tuple:
        items = get_args(bare)
        if Ellipsis not in items:
            return f"a list of {len(items)} values: {', '.join(map(describe_type, items))}"
        item, item_limits = _unwrap(items[0])
        plural = _PLURALS[item] + item_limits if item in _PLURALS else f"values, each {describe_type(items[0])}"
        return f"a list of {plural}{limits}"
    members = [describe_type(member) for member in _members(bare)] or [_name(bare)]
    return (", or " if any(" or " in member for member in members) else " or ").join(members)


def type_problem(annotation: Any) -> str | None:
    """Return why no setting can have this type, or None where it can."""
    for leaf in leaves_of(annotation):
        kind = get_origin(leaf) or leaf
        if kind in (list, set):
            item = _name(*get_args(leaf)) if get_args(leaf) else "str"
            return f"{_name(leaf)} can't be hashed; use tuple[{item}, ...]"
        if kind is dict:
            return f"{_name(leaf)} can't be hashed; use a field for each key"
        if kind is tuple:
            return f"{_name(leaf)} does not say what it holds; write tuple[str, ...] or the like"
        choices = choices_of(leaf)
        if (kind not in _WORDS and not choices) or any(
            type(choice) not in (int, str, types.NoneType) for choice in choices
        ):
            return (
                f"{_name(leaf)} can't be written in a config file; allowed are bool, int, float, str, None, "
                "Literal and Enum of strings and integers, and tuples and unions of these"
            )
    try:
        msgspec.convert(object(), annotation)
    except msgspec.ValidationError:
        return None  # the type can be checked against, and `object()` does not fit it
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def leaves_of(annotation: Any) -> list[Any]:
    """Return the types that a type is made of, unions and tuples taken apart."""
    bare, _ = _unwrap(annotation)
    parts = _members(bare) or (get_args(bare) if get_origin(bare) is tuple else ())
    if not parts:
        return [bare]
    return [leaf for part in parts if part is not Ellipsis for leaf in leaves_of(part)]


def choices_of(bare: Any) -> list[Any]:
    """Return the values of a `Literal` or an `Enum`, in the order in which they are defined; none for other types."""
    if get_origin(bare) is Literal:
        return list(get_args(bare))
    members: list[Enum] = list(bare) if isinstance(bare, EnumMeta) else []
    return [member.value for member in members]


def _one_of(choices: list[Any]) -> str:
    shown = ["null" if choice is None else repr(choice) for choice in choices]
    if len(shown) < 3:
        return " or ".join(shown)
    return f"one of {', '.join(shown[:-1])} or {shown[-1]}"


def _unwrap(annotation: Any) -> tuple[Any, str]:
    """Return the type without `Annotated` and aliases, and its limits in words."""
    limits: dict[str, Any] = {}
    while True:
        if get_origin(annotation) is Annotated:
            for meta in annotation.__metadata__:
                if isinstance(meta, msgspec.Meta):
                    limits |= {name: limit for name in _LIMITS if (limit := getattr(meta, name)) is not None}
            annotation = annotation.__origin__
        elif hasattr(annotation, "__value__"):  # `type Positive = ...`, from Python 3.12 on
            annotation = annotation.__value__
        else:
            break
    words = [_LIMITS[name].format(limit) for name, limit in limits.items()]
    return types.NoneType if annotation is None else annotation, " and".join(words)


def _members(bare: Any) -> tuple[Any, ...]:
    return get_args(bare) if get_origin(bare) in (Union, types.UnionType) else ()


def _name(bare: Any) -> str:
    return bare.__name__ if isinstance(bare, type) and not get_args(bare) else str(bare)
