"""The strict conversion of a value, or of a text, to the type of a setting, and the words where it does not fit."""

from __future__ import annotations

import json
import math
import tomllib
import types
from collections.abc import Iterator
from enum import Enum
from typing import Any

import msgspec

from parallel_core.errors import did_you_mean
from parallel_core.field_types import choices_of, describe_type, leaves_of

__all__ = ["MismatchError", "convert", "convert_text", "shown"]

_PLAIN = (bool, int, float, str, types.NoneType)
_TRUTHS = {"true": "true", "yes": "true", "on": "true", "false": "false", "no": "false", "off": "false"}

# What torch calls them is too far from these for a comparison letter by letter.
_DTYPES = {"float32": "fp32", "float": "fp32", "float16": "fp16", "half": "fp16", "bfloat16": "bf16"}


class MismatchError(ValueError):
    """A value does not fit its setting; the text says `expected ..., found ...`."""


def convert(value: object, annotation: Any) -> Any:
    """Return the value as the type has it: a list becomes a tuple, an integer given for a number a float.

    Nothing else changes: a string is no number, true is no integer, and 1e7 is no integer either.

    Raises:
        MismatchError: the value does not fit.
    """
    try:
        return _fit(value, annotation)
    except ValueError:
        raise _mismatch(value, annotation, value) from None


def convert_text(text: str, annotation: Any) -> Any:
    """Return what a text says, for a source in which there are only texts.

    The text is read as a TOML value and, where that does not fit, as a plain string. TOML has no word for nothing, so
    `null` is None where a setting may be None.

    Raises:
        MismatchError: neither fits.
    """
    text = text.strip()
    if text == "null" and _fits(None, annotation):
        return None
    readings = [*_read_toml(text), text]
    for reading in readings:
        if _fits(reading, annotation):
            return _fit(reading, annotation)
    raise _mismatch(text, annotation, readings[0], of_text=True)


def _fit(value: object, annotation: Any) -> Any:
    try:
        _check_plain(value, annotation)
        return msgspec.convert(value, annotation)
    except RecursionError:  # YAML can say that a list holds itself
        raise ValueError("a list that holds itself") from None


def _fits(value: object, annotation: Any) -> bool:
    try:
        _fit(value, annotation)
    except ValueError:
        return False
    return True


def _check_plain(value: object, annotation: Any) -> None:
    # By exact class: a numpy scalar, a set and a member of a foreign StrEnum are near enough for msgspec to let some
    # of them through, and would then be printed, pickled and compared as something else than what a file says. Not a
    # number equals nothing, itself included, and JSON can't hold it, nor infinity.
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        for item in value:
            _check_plain(item, annotation)
    elif type(value) not in _PLAIN and not (isinstance(value, Enum) and type(value) in leaves_of(annotation)):
        raise ValueError("not a plain value")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError("not a finite number")
    elif isinstance(value, int):
        repr(value)  # a ValueError where it has thousands of digits: no config with it could be printed


def _read_toml(text: str) -> Iterator[Any]:
    """Yield the one TOML value that the text is, if it is one."""
    # Alone after the `=` a value may be followed by a comment, or by lines that set something else; between brackets
    # there may be several values. What reads the same both ways is one value and nothing beside it.
    try:
        alone = tomllib.loads(f"value = {text}")
        listed = tomllib.loads(f"value = [{text}]")
    except (ValueError, RecursionError):
        return
    if alone.keys() == listed.keys() == {"value"} and listed["value"] == [alone["value"]]:
        yield alone["value"]


def _mismatch(found: object, annotation: Any, reading: object, *, of_text: bool = False) -> MismatchError:
    hint = _hint(reading, annotation, of_text=of_text)
    return MismatchError(f"expected {describe_type(annotation)}, found {shown(found)}{hint}")


def _hint(value: object, annotation: Any, *, of_text: bool) -> str:
    leaves = leaves_of(annotation)
    if isinstance(value, Enum):
        return "; pass its .value"
    if hasattr(value, "tolist"):
        return "; .tolist() makes plain Python of it"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "; a setting is a finite number" if float in leaves else ""
        return f"; write {int(value):_}" if value.is_integer() and _fits(int(value), annotation) else ""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"; write {str(bool(value)).lower()}" if value in (0, 1) and bool in leaves else ""
    if not isinstance(value, str):
        return ""
    unquoted = "" if of_text else ", without quotes"
    if unquoted and any(_fits(reading, annotation) for reading in _read_toml(value)):
        return f"; write {value.strip()}{unquoted}"
    if bool in leaves and value.lower() in _TRUTHS:
        return f"; write {_TRUTHS[value.lower()]}{unquoted}"
    if of_text and value.lower() == "none" and _fits(None, annotation):
        return "; write null"
    listed = [item.strip() for item in value.split(",")]
    if not set(value) & set("[]\"'") and _fits(listed, annotation):
        return f"; write {json.dumps(listed)}"
    choices = [choice for leaf in leaves for choice in choices_of(leaf) if isinstance(choice, str)]
    meant = _DTYPES.get(value.lower().removeprefix("torch."), value.lower())
    return f"; did you mean {meant!r}?" if meant in choices else did_you_mean(value, choices)


def shown(value: object) -> str:
    """Return a value as an error shows it: in one line, and cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # a file can say it in hexadecimal, and Python does not write it in decimal
        text = "an integer of thousands of digits"
        return text if isinstance(value, int) else f"a {type(value).__name__} with {text}"
    text = " ".join(text.split()) if "\n" in text else text
    return text if len(text) <= 200 else f"{text[:200]}..."
