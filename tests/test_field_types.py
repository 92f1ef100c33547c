"""The types of settings in words, and which types no setting can have."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Annotated, Any, Literal, Optional

import pytest
from msgspec import Meta

from parallel_core.field_types import describe_type, type_problem


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


Positive = Annotated[float, Meta(gt=0)]


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (bool, "true or false"),
        (int, "an integer"),
        (float, "a number"),
        (str, "a string"),
        (None, "null"),
        (Annotated[int, Meta(ge=0)], "an integer >= 0"),
        (Annotated[int, Meta(ge=1), Meta(le=10_000)], "an integer >= 1 and <= 10_000"),
        (Annotated[int, Meta(multiple_of=8, description="of bytes")], "an integer divisible by 8"),
        (Annotated[float, Meta(gt=0, lt=0.5)], "a number > 0 and < 0.5"),
        (Annotated[str, Meta(min_length=1)], "a string of length >= 1"),
        (Annotated[str, Meta(pattern="^a+$")], "a string that matches '^a+$'"),
        (Literal["a"], "'a'"),
        (Literal["b", "a"], "'b' or 'a'"),
        (Literal["fp32", "bf16", "fp16"], "one of 'fp32', 'bf16' or 'fp16'"),
        (Literal["a", 2, None], "one of 'a', 2 or null"),
        (Color, "'red' or 'blue'"),
        (Positive | None, "a number > 0 or null"),
        (Optional[Color], "'red' or 'blue', or null"),  # noqa: UP045  # the older spelling is a type of its own
        (bool | None, "true or false, or null"),
        (int | str, "an integer or a string"),
        (tuple[str, ...], "a list of strings"),
        (tuple[Annotated[int, Meta(ge=0)], ...], "a list of integers >= 0"),
        (tuple[Positive, float], "a list of 2 values: a number > 0, a number"),
        (Annotated[tuple[float, ...], Meta(max_length=3)], "a list of numbers of length <= 3"),
        (tuple[Color, ...], "a list of values, each 'red' or 'blue'"),
        (tuple[tuple[str, ...], ...] | None, "a list of values, each a list of strings or null"),
    ],
)
def test_a_type_reads_as_what_a_person_may_write(annotation: Any, words: str) -> None:
    assert describe_type(annotation) == words
    assert type_problem(annotation) is None


ALLOWED = (
    "can't be written in a config file; allowed are bool, int, float, str, None, "
    "Literal and Enum of strings and integers, and tuples and unions of these"
)


class Shape(enum.Enum):
    POINT = (0, 0)


@pytest.mark.parametrize(
    ("annotation", "problem"),
    [
        (list[str], "list[str] can't be hashed; use tuple[str, ...]"),
        (list, "list can't be hashed; use tuple[str, ...]"),
        (list[int] | None, "list[int] can't be hashed; use tuple[int, ...]"),
        (tuple[list[int], ...], "list[int] can't be hashed; use tuple[int, ...]"),
        (tuple[int, Annotated[set[str], Meta(min_length=1)]], "set[str] can't be hashed; use tuple[str, ...]"),
        (dict[str, int], "dict[str, int] can't be hashed; use a field for each key"),
        (dict, "dict can't be hashed; use a field for each key"),
        (tuple, "tuple does not say what it holds; write tuple[str, ...] or the like"),
        (tuple[()], "tuple[()] does not say what it holds; write tuple[str, ...] or the like"),
        (frozenset[str], f"frozenset[str] {ALLOWED}"),
        (bytes, f"bytes {ALLOWED}"),
        (Any, f"Any {ALLOWED}"),
        (object, f"object {ALLOWED}"),
        (Callable[[], int], f"collections.abc.Callable[[], int] {ALLOWED}"),
        (Literal["a", True], f"typing.Literal['a', True] {ALLOWED}"),
        (Shape, f"Shape {ALLOWED}"),
    ],
)
def test_a_type_that_no_setting_can_have_is_refused_with_what_to_use(annotation: Any, problem: str) -> None:
    assert type_problem(annotation) == problem


def test_a_union_that_can_not_be_told_apart_is_refused() -> None:
    assert str(type_problem(str | Color)).startswith("Type unions may not contain more than one str-like type")
