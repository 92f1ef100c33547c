"""Every error of the package has one base class and crosses to another process as what it is."""

from __future__ import annotations

import copy
import pickle

import pytest

from parallel_core import errors
from parallel_core.errors import ConfigError, ParallelCoreError, StateDictError, did_you_mean

CLASSES = [getattr(errors, name) for name in errors.__all__ if name.endswith("Error")]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_is_caught_by_the_base_class(kind: type[ParallelCoreError]) -> None:
    assert issubclass(kind, ParallelCoreError)
    assert issubclass(kind, Exception)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("crossing", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
def test_every_error_survives_pickling_and_copying(kind: type[ParallelCoreError], crossing: type) -> None:
    error = crossing(kind("first: expected a number"))
    assert type(error) is kind
    assert str(error) == "first: expected a number"


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_is_made_of_one_message(kind: type[ParallelCoreError]) -> None:
    """As `agree` does it on the other ranks."""
    original = kind("what, found, allowed")
    assert str(kind(str(original))) == str(original)


def test_a_config_error_lists_its_problems() -> None:
    error = ConfigError(["a: expected an integer", "b: unknown setting"])
    assert error.problems == ("a: expected an integer", "b: unknown setting")
    assert str(error) == "2 problems in the configuration:\n  - a: expected an integer\n  - b: unknown setting"


def test_a_config_error_with_one_problem_is_that_problem() -> None:
    assert str(ConfigError("a: expected an integer")) == str(ConfigError(("a: expected an integer",)))
    assert ConfigError("a: expected an integer").problems == ("a: expected an integer",)


def test_a_config_error_keeps_its_problems_across_processes() -> None:
    error = pickle.loads(pickle.dumps(ConfigError(("a: wrong", "b: wrong"))))
    assert error.problems == ("a: wrong", "b: wrong")
    assert str(error) == "2 problems in the configuration:\n  - a: wrong\n  - b: wrong"


def test_an_error_says_its_text_alone() -> None:
    assert str(StateDictError("missing keys: 'a'")) == "missing keys: 'a'"


@pytest.mark.parametrize(
    ("found", "allowed", "hint"),
    [
        ("fdsp", ["ddp", "fsdp"], "; did you mean 'fsdp'?"),
        ("ful", ["full", "sharded"], "; did you mean 'full'?"),
        ("zzz", ["ddp", "fsdp"], ""),
        ("ddp", [], ""),
    ],
)
def test_the_nearest_allowed_name_is_offered(found: str, allowed: list[str], hint: str) -> None:
    assert did_you_mean(found, allowed) == hint
