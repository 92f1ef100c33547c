"""The contract is whole: each hook has a specification, a default or is required, and a typed method."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parallel_core import defaults, hookspecs
from parallel_core.binding import specifications
from parallel_core.hookspecs import REQUIRED_HOOKS, StateDictType
from parallel_core.strategy import Strategy, bare_model_strategy
from parallel_core.strategy_config import StrategyConfig

SPECIFICATIONS = specifications()

each_hook = pytest.mark.parametrize("hook", SPECIFICATIONS)


def arguments_of(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_hooks_are_these() -> None:
    assert list(SPECIFICATIONS) == [
        "strategy_config",
        "applies",
        "plan_units",
        "check_model",
        "wrap_model",
        "wrap_meta_model",
        "wrap_optimizer",
        "settle",
        "model_state_dict",
        "load_model_state_dict",
        "optimizer_state_dict",
        "load_optimizer_state_dict",
        "local_shards",
        "clip_grad_norm",
        "no_sync",
        "has_unsynchronised_gradients",
        "grad_scaler",
        "data_parallel",
    ]


def test_every_public_function_of_hookspecs_is_a_hook() -> None:
    functions = [name for name, value in vars(hookspecs).items() if inspect.isfunction(value)]
    assert functions == list(SPECIFICATIONS)


@each_hook
def test_every_hook_gives_the_first_result_only(hook: str) -> None:
    assert SPECIFICATIONS[hook].parallel_core_spec["firstresult"] is True


@each_hook
def test_every_hook_is_required_or_has_a_default(hook: str) -> None:
    assert (hook in REQUIRED_HOOKS) != hasattr(defaults, hook)


def test_the_defaults_answer_hooks_and_nothing_else() -> None:
    marked = [name for name, value in vars(defaults).items() if getattr(value, "parallel_core_impl", None)]
    assert set(marked) == set(SPECIFICATIONS) - set(REQUIRED_HOOKS)


@each_hook
def test_a_default_takes_no_argument_that_the_hook_lacks(hook: str) -> None:
    if hook not in REQUIRED_HOOKS:
        assert set(arguments_of(getattr(defaults, hook))) <= set(arguments_of(SPECIFICATIONS[hook]))


@each_hook
def test_every_hook_has_a_typed_method_with_its_arguments(hook: str) -> None:
    if hook == "strategy_config":  # called once, at binding; the answer is an attribute
        assert bare_model_strategy().config_class is StrategyConfig
        return
    method, spec = getattr(Strategy, hook), SPECIFICATIONS[hook]
    assert arguments_of(method) == arguments_of(spec)
    # The annotations are strings, the same in both modules.
    assert method.__annotations__ == spec.__annotations__


@each_hook
def test_every_hook_says_what_it_does(hook: str) -> None:
    lines = inspect.getdoc(SPECIFICATIONS[hook]).splitlines()  # type: ignore[union-attr]  # None fails the test as well
    assert lines[0].endswith(".")
    assert any(line.startswith(("When:", "Must:", "Returns:")) or "Default:" in line for line in lines)


def test_no_argument_of_a_hook_is_optional_or_keyword_only() -> None:
    for spec in SPECIFICATIONS.values():
        for parameter in inspect.signature(spec).parameters.values():
            assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            assert parameter.default is parameter.empty


def test_a_state_dict_type_is_its_string() -> None:
    assert StateDictType("full") is StateDictType.FULL
    assert StateDictType("sharded") == "sharded"
    assert [str(member) for member in StateDictType] == ["full", "sharded"]


def test_torch_is_not_imported_by_the_modules_that_find_and_bind_strategies(tmp_path: Path) -> None:
    modules = ("hookspecs", "registry", "binding", "defaults", "strategy", "strategy_config")
    code = "".join(f"import parallel_core.{module}\n" for module in modules)
    code += "import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, timeout=60).returncode == 0
