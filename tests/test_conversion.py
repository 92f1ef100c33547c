"""Values and texts are converted strictly: nothing becomes what a person did not mean."""

from __future__ import annotations

import enum
import math
from typing import Annotated, Any, Literal

import pytest
import torch
from msgspec import Meta

from parallel_core.conversion import MismatchError, convert, convert_text


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Name(enum.StrEnum):
    A = "a"


class Number(enum.IntEnum):
    ONE = 1


Mode = Literal["fp32", "bf16", "fp16"]
Count = Annotated[int, Meta(ge=0)]


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, float, 3.0),
        (3, int | float, 3),
        (["a", "b"], tuple[str, ...], ("a", "b")),
        ([[1], []], tuple[tuple[int, ...], ...], ((1,), ())),
        ((1, 2), tuple[float, float], (1.0, 2.0)),
        ("red", Color, Color.RED),
        (Color.BLUE, Color, Color.BLUE),
        ([Color.RED, "blue"], tuple[Color, ...], (Color.RED, Color.BLUE)),
        (None, int | None, None),
        ("bf16", Mode, "bf16"),
        (10**30, int, 10**30),
    ],
)
def test_what_fits_is_converted(value: object, annotation: Any, expected: object) -> None:
    converted = convert(value, annotation)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("value", "annotation", "message"),
    [
        (1e7, Count, "expected an integer >= 0, found 10000000.0; write 10_000_000"),
        (-1.0, Count, "expected an integer >= 0, found -1.0"),
        (0.5, int, "expected an integer, found 0.5"),
        (-1, Count, "expected an integer >= 0, found -1"),
        (True, int, "expected an integer, found True"),
        (True, float, "expected a number, found True"),
        (1, bool, "expected true or false, found 1; write true"),
        (0, bool, "expected true or false, found 0; write false"),
        (2, bool, "expected true or false, found 2"),
        (1.0, bool, "expected true or false, found 1.0"),
        ("true", bool, "expected true or false, found 'true'; write true, without quotes"),
        ("no", bool, "expected true or false, found 'no'; write false, without quotes"),
        ("maybe", bool, "expected true or false, found 'maybe'"),
        ("8", int, "expected an integer, found '8'; write 8, without quotes"),
        ("5e-5", float, "expected a number, found '5e-5'; write 5e-5, without quotes"),
        (math.nan, float, "expected a number, found nan; a setting is a finite number"),
        (math.inf, float | None, "expected a number or null, found inf; a setting is a finite number"),
        (math.inf, int, "expected an integer, found inf"),
        ([math.nan], tuple[float, ...], "expected a list of numbers, found [nan]"),
        (10**400, float, f"expected a number, found 1{'0' * 199}..."),
        (None, int, "expected an integer, found None"),
        (3, str, "expected a string, found 3"),
        (b"a", str, "expected a string, found b'a'"),
        ("fp8", Mode, "expected one of 'fp32', 'bf16' or 'fp16', found 'fp8'"),
        ("BF16", Mode, "expected one of 'fp32', 'bf16' or 'fp16', found 'BF16'; did you mean 'bf16'?"),
        ("bfp16", Mode, "expected one of 'fp32', 'bf16' or 'fp16', found 'bfp16'; did you mean 'fp16'?"),
        ("rad", Color, "expected 'red' or 'blue', found 'rad'; did you mean 'red'?"),
        (Name.A, str, "expected a string, found <Name.A: 'a'>; pass its .value"),
        (Name.A, Literal["a", "b"], "expected 'a' or 'b', found <Name.A: 'a'>; pass its .value"),
        (Number.ONE, int, "expected an integer, found <Number.ONE: 1>; pass its .value"),
        (torch.tensor(8), int, "expected an integer, found tensor(8); .tolist() makes plain Python of it"),
        (
            torch.zeros(2, 1),
            tuple[float, ...],
            "expected a list of numbers, found tensor([[0.], [0.]]); .tolist() makes plain Python of it",
        ),
        ("a", tuple[str, ...], "expected a list of strings, found 'a'; write [\"a\"]"),
        ("a, b", tuple[str, ...], 'expected a list of strings, found \'a, b\'; write ["a", "b"]'),
        (["a", 3], tuple[str, ...], "expected a list of strings, found ['a', 3]"),
        ({"a"}, tuple[str, ...], "expected a list of strings, found {'a'}"),
        ({"a": 1}, tuple[str, ...], "expected a list of strings, found {'a': 1}"),
        ([1.0], tuple[float, float], "expected a list of 2 values: a number, a number, found [1.0]"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_is_allowed(value: object, annotation: Any, message: str) -> None:
    with pytest.raises(MismatchError) as refused:
        convert(value, annotation)
    assert str(refused.value) == message


def test_a_list_that_holds_itself_is_refused() -> None:
    value: list[object] = []
    value.append(value)
    with pytest.raises(MismatchError, match=r"^expected a list of strings, found \[\[\.\.\.\]\]$"):
        convert(value, tuple[str, ...])


@pytest.mark.parametrize(
    ("text", "annotation", "expected"),
    [
        ("true", bool, True),
        (" false\n", bool, False),
        ("10_000_000", int, 10_000_000),
        ("0x10", int, 16),
        ("5", float, 5.0),
        ("5e-5", float, 5e-5),
        ("bf16", Mode, "bf16"),
        ('"bf16"', Mode, "bf16"),
        ("blue", Color, Color.BLUE),
        ('["a", "b"]', tuple[str, ...], ("a", "b")),
        ("[1,\n2]", tuple[int, ...], (1, 2)),
        ("[]", tuple[str, ...], ()),
        ("null", int | None, None),
        ("7", int | None, 7),
        # Where a string is meant, what TOML would read as something else is one too.
        ("5", str, "5"),
        ("true", str, "true"),
        ("nan", str, "nan"),
        ("2026-01-02", str, "2026-01-02"),
        ("null", str, "null"),
        ('"null"', str | None, "null"),
        ("null", str | None, None),
        ("", str, ""),
        ("a # b", str, "a # b"),
        ('"a" # b', str, '"a" # b'),
        ("a = 1", str, "a = 1"),
        ("1\nother = 2", str, "1\nother = 2"),
        ("[1]", str, "[1]"),
    ],
)
def test_a_text_is_a_toml_value_or_else_a_string(text: str, annotation: Any, expected: object) -> None:
    converted = convert_text(text, annotation)
    assert converted == expected
    assert type(converted) is type(expected)


@pytest.mark.parametrize(
    ("text", "annotation", "message"),
    [
        ("True", bool, "expected true or false, found 'True'; write true"),
        ("yes", bool, "expected true or false, found 'yes'; write true"),
        ("OFF", bool, "expected true or false, found 'OFF'; write false"),
        ("1", bool, "expected true or false, found '1'; write true"),
        ("", bool, "expected true or false, found ''"),
        ('"true"', bool, "expected true or false, found '\"true\"'; write true"),
        ("1e7", int, "expected an integer, found '1e7'; write 10_000_000"),
        ("1\nother = 2", int, "expected an integer, found '1\\nother = 2'"),
        ("1]\nother = [2", int, "expected an integer, found '1]\\nother = [2'"),
        ("1, 2", int, "expected an integer, found '1, 2'"),
        ("1,", int, "expected an integer, found '1,'"),
        ("1 # one", int, "expected an integer, found '1 # one'"),
        ("{a = 1}", int, "expected an integer, found '{a = 1}'"),
        ("nan", float, "expected a number, found 'nan'"),
        ("inf", float, "expected a number, found 'inf'; a setting is a finite number"),
        ("null", int, "expected an integer, found 'null'"),
        ("None", int | None, "expected an integer or null, found 'None'; write null"),
        ('["a"', tuple[str, ...], "expected a list of strings, found '[\"a\"'"),
        ("a,b", tuple[str, ...], 'expected a list of strings, found \'a,b\'; write ["a", "b"]'),
        ("9" * 5000, int, f"expected an integer, found '{'9' * 199}..."),
        ("[" * 100_000, int, f"expected an integer, found '{'[' * 199}..."),
    ],
)
def test_a_text_that_fits_neither_way_is_refused(text: str, annotation: Any, message: str) -> None:
    with pytest.raises(MismatchError) as refused:
        convert_text(text, annotation)
    assert str(refused.value) == message
