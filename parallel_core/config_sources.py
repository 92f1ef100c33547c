"""Where settings come from: a file, the environment and overrides, read into plain values, each with its place.

Nothing here knows which settings there are. What can't be read is a problem, a line that says its place too, so that
one error can list all that is wrong with all sources.
"""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_core.conversion import shown
from parallel_core.errors import did_you_mean

__all__ = ["ENVIRONMENT_PREFIX", "Setting", "read_environment", "read_file", "read_overrides"]

ENVIRONMENT_PREFIX = "PARALLEL_CORE_"


@dataclass(frozen=True)
class Setting:
    """One setting as it was found.

    Attributes:
        name: the name of a field, if all is well.
        place: what a problem with it begins with.
        value: what was found for it.
        text: what was found for it, where there are only texts; then there is no value.
        origin: where it came from, in short; empty for what was given in Python.
        table: the table's whole name, if this is a table of a file.
        spell: how the source writes the name of a field.
    """

    name: str
    place: str
    value: object = None
    text: str | None = None
    origin: str = ""
    table: str | None = None
    spell: Callable[[str], str] = str


class _UnreadableError(Exception):
    """A file can't be read as what its name says; the text is the problem."""


def read_file(path: object, table: object) -> list[Setting | str]:
    """Return the settings at the top of a TOML, YAML or JSON file, or in the named table of it.

    Args:
        path: the file; its suffix says what it is.
        table: the table's name, dotted if it lies in another one; None for the top.
    """
    if not isinstance(table, str | None):
        return [f"table: expected the name of a table, found {table!r}"]
    if not isinstance(path, str | os.PathLike):
        return [f"path: expected the path of a file, found {path!r}"]
    path = Path(path)
    try:
        content = _find_table(_parse(path), table)
    except _UnreadableError as problem:
        return [f"{path}: {problem}"]
    found: list[Setting | str] = []
    for key, value in content.items():
        told = key if isinstance(key, str) else shown(key)
        name = f"{table}.{told}" if table else told
        if isinstance(key, str):
            inner = name if isinstance(value, dict) else None
            found.append(Setting(key, f"{path}: {name}", value, origin=str(path), table=inner))
        else:
            found.append(f"{path}: {name}: expected the name of a setting, found {told}")
    return found


def read_environment(environ: object) -> list[Setting | str]:
    """Return the settings in the variables that begin with `PARALLEL_CORE_`, sorted by name."""
    if not isinstance(environ, Mapping):
        return [f"environ: expected a dict of variables, found {environ!r:.80}"]
    found: list[Setting | str] = []
    for variable in sorted(name for name in environ if isinstance(name, str)):
        if variable.startswith(ENVIRONMENT_PREFIX):
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            place = f"environment: {variable}"
            if not variable.isupper():
                found.append(f"{place}: expected a name in capitals; did you mean {_variable(name)!r}?")
                continue
            if not isinstance(environ[variable], str):
                found.append(f"{place}: expected a text, as all variables have, found {environ[variable]!r:.80}")
                continue
            found.append(Setting(name, place, text=environ[variable], origin=place, spell=_variable))
    return found


def read_overrides(overrides: object) -> list[Setting | str]:
    """Return the settings of strings such as `fsdp_cpu_offload=true`."""
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        kind = "the string " if isinstance(overrides, str) else ""
        return [f"overrides: expected a list of strings such as 'name=value', found {kind}{overrides!r:.80}"]
    found: list[Setting | str] = []
    for override in overrides:
        if not isinstance(override, str) or "=" not in override:
            found.append(f"override {override!r}: expected a string such as 'name=value'")
            continue
        name, _, text = override.partition("=")
        found.append(Setting(name.strip(), f"override {override!r}", text=text, origin="override"))
    return found


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _parse(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix not in _PARSERS:
        found = f"found {path.suffix!r}" if suffix else "found no ending"
        raise _UnreadableError(f"expected a file that ends in .toml, .yaml, .yml or .json, {found}")
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise _UnreadableError("expected a file, found a pipe or a device")  # which may never have an end
        # A byte order mark, which some editors write, is no part of the text.
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        looked = "" if path.is_absolute() else f"; looked for {path.absolute()}"
        raise _UnreadableError(f"no such file{looked}") from None
    except IsADirectoryError:
        raise _UnreadableError("expected a file, found a directory") from None
    except UnicodeDecodeError as error:
        raise _UnreadableError(f"expected text in UTF-8, found the byte {error.object[error.start]:#04x}") from None
    except (OSError, ValueError) as error:  # a ValueError is a name that no file can have
        raise _UnreadableError(f"can't be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        return _PARSERS[suffix](text)
    except RecursionError:
        raise _UnreadableError("is nested too deeply") from None


def _parse_toml(text: str) -> Any:
    try:
        return tomllib.loads(text)
    except ValueError as error:  # its text ends with line and column, but for an error at the very end
        lines = len(text.splitlines())
        problem = str(error).replace("(at end of document)", f"(at the end, line {lines})")
        raise _UnreadableError(f"not valid TOML: {_digits_problem(error) or problem}") from None


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant) if text.strip() else None
    except json.JSONDecodeError as error:
        where = f"(at line {error.lineno}, column {error.colno})"
        raise _UnreadableError(f"not valid JSON: {error.msg} {where}") from None
    except ValueError as error:
        raise _UnreadableError(f"not valid JSON: {_digits_problem(error) or error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _UnreadableError(f"the key {key!r} is given twice")
        values[key] = value
    return values


def _refuse_constant(constant: str) -> Any:
    raise _UnreadableError(f"not valid JSON: {constant} is no number in JSON")


def _parse_yaml(text: str) -> Any:
    try:
        from ruamel.yaml import YAML
        from ruamel.yaml.error import MarkedYAMLError
    except ImportError:
        raise _UnreadableError("YAML needs ruamel.yaml; `pip install parallel-core[yaml]` brings it") from None
    try:
        # YAML 1.2: `no` is a string and 5e-5 a number. Pure, for the C parser is one of YAML 1.1.
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else ""
        problem = error.problem or error.context
        if error.problem and error.context and error.problem.startswith("but "):  # the context is half of the sentence
            problem = f"{error.context}, {error.problem}"
        raise _UnreadableError(f"not valid YAML: {problem}{where}") from None
    except RecursionError:
        raise
    except Exception as error:
        # A character that YAML does not allow, a date such as 2026-02-30; `!!bool x` is a KeyError, `!!int ""` an
        # IndexError. All are faults of the file.
        problem = _digits_problem(error) or f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise _UnreadableError(f"not valid YAML: {problem}") from None


def _digits_problem(error: Exception) -> str | None:
    """Return in words that an integer is too long for Python, whose own advice is for a program and not for a file."""
    if "set_int_max_str_digits" not in str(error):
        return None
    return f"found an integer of more than {sys.get_int_max_str_digits()} digits"


_PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": _parse_toml,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".json": _parse_json,
}


def _find_table(content: Any, table: str | None) -> dict[Any, Any]:
    if not isinstance(content, dict | None):
        raise _UnreadableError(f"expected settings at the top, found {_kind(content)}")
    found, place = content or {}, "at the top"
    names = table.split(".") if table is not None else []
    depth = 0
    while depth < len(names):
        # A table's own name may have dots, in quotes.
        ends = range(depth + 1, len(names) + 1)
        depth, name = next(
            ((end, key) for end in ends if (key := ".".join(names[depth:end])) in found), (depth + 1, names[depth])
        )
        if name not in found:
            tables = [key for key, value in found.items() if isinstance(value, dict) and isinstance(key, str)]
            there = f"the tables {place} are {', '.join(map(repr, tables))}" if tables else f"there is none {place}"
            raise _UnreadableError(f"no table {table!r}; {there}{did_you_mean(name, tables)}")
        inner, place = found[name], f"in {'.'.join(names[:depth])!r}"
        if not isinstance(inner, dict | None):
            raise _UnreadableError(f"expected a table {place[3:]}, found {_kind(inner)}")
        found = inner or {}
    return found


def _kind(value: object) -> str:
    return "a list" if isinstance(value, list) else shown(value)
