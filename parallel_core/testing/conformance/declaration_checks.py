"""What is wrong with a declaration, found where it is made: a clause would fail late, or pass without a look."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from typing import Any

from parallel_core.errors import did_you_mean
from parallel_core.testing.models import CASES


def declaration_problems(
    own: Mapping[str, Any], declared: Mapping[str, Any], capabilities: type[Enum]
) -> Iterator[str]:
    """Yield what is wrong with the attributes of a conformance class, a sentence each.

    Args:
        own: what the class itself has.
        declared: the attributes that it may set, with the values that they have in it; `strategy` may be missing.
        capabilities: what it may lack.
    """
    for name, value in own.items():
        is_data = not callable(value) and not hasattr(value, "__get__")  # no test, no fixture, no property
        if is_data and name not in declared and (meant := did_you_mean(name, declared)):
            yield f"{name}: no attribute of a declaration{meant} Give one of your own another name"
    strategy = declared.get("strategy", "")
    if not isinstance(strategy, str):
        yield f"strategy: expected its name, found {strategy!r}"
    yield from _option_problems("options", declared["options"], f"{strategy}_")
    for case, options in _items(declared["options_for"]):
        yield from _option_problems(f"options_for[{case!r}]", options, f"{strategy}_")
    sizes = declared["world_sizes"]
    if not isinstance(sizes, tuple | list) or not sizes or not all(isinstance(n, int) and n >= 2 for n in sizes):
        yield f"world_sizes: expected a tuple of integers, each at least 2, found {sizes!r}"
    if isinstance(declared["models"], str) or not isinstance(declared["models"], Collection) or not declared["models"]:
        yield f"models: expected a list of names of cases, found {declared['models']!r}"
    else:
        yield from _case_problems("models", declared["models"])
    for name in ("options_for", "refuses", "lacks"):
        if not isinstance(declared[name], Mapping):
            yield f"{name}: expected a dict, found {declared[name]!r}"
        elif name != "lacks":
            yield from _case_problems(name, declared[name])
    for capability, reason in _items(declared["lacks"]):
        if not isinstance(capability, capabilities):
            known = ", ".join(map(str, capabilities.__members__))
            yield f"lacks: expected members of {capabilities.__name__}, found {capability!r}; its members are {known}"
        elif not isinstance(reason, str) or not reason.strip():
            yield f"lacks: expected the reason why it lacks {capability.name}, found {reason!r}"
    for case, pattern in _items(declared["refuses"]):
        try:
            re.compile(pattern)
        except (TypeError, re.error) as error:
            yield f"refuses[{case!r}]: expected a regular expression, found {pattern!r} ({error})"


def _option_problems(where: str, options: object, prefix: str) -> Iterator[str]:
    if not isinstance(options, Mapping):
        yield f"{where}: expected a dict, found {options!r}"
    elif wrong := [name for name in options if not isinstance(name, str) or name.startswith(prefix)]:
        yield f"{where}: expected names of settings without the strategy's prefix, found {wrong}"


def _case_problems(where: str, names: Collection[object]) -> Iterator[str]:
    if unknown := [name for name in names if name not in [*CASES]]:
        yield f"{where}: expected names of cases, found {unknown}; cases are {', '.join(CASES)}"


def _items(declared: object) -> Collection[tuple[Any, Any]]:
    """Return the items of a dict, and none of anything else, which is told of once."""
    return declared.items() if isinstance(declared, Mapping) else ()
