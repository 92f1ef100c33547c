"""What `import parallel_core` gives: every public name, lazily, and nothing that waits for torch."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import parallel_core

SOURCE = Path(parallel_core.__file__ or "").read_text(encoding="utf-8")


def test_the_public_names_are_these() -> None:
    assert sorted(parallel_core.__all__) == [
        "AvailableStrategy",
        "CheckpointError",
        "CheckpointSave",
        "ConfigError",
        "DistributedConfig",
        "IncompatibleKeys",
        "LoadedCheckpoint",
        "ParallelCoreError",
        "ProcessGroupError",
        "RankError",
        "StateDictError",
        "StateDictType",
        "StrategyConfig",
        "StrategyError",
        "TrainingError",
        "WrapError",
        "WrapReport",
        "available_strategies",
        "clip_grad_norm",
        "data_parallel",
        "grad_scaler",
        "hookimpl",
        "latest_checkpoint",
        "load_checkpoint",
        "load_config",
        "load_model_state_dict",
        "load_optimizer_state_dict",
        "model_state_dict",
        "no_sync",
        "optimizer_state_dict",
        "process_group",
        "save_checkpoint",
        "wrap_model_for_training",
        "wrap_optimizer",
        "wrap_report",
    ]


@pytest.mark.parametrize("name", parallel_core.__all__)
def test_every_public_name_can_be_had_and_is_documented(name: str) -> None:
    value = getattr(parallel_core, name)
    assert value.__doc__


@pytest.mark.parametrize("name", parallel_core.__all__)
def test_every_public_name_is_public_in_its_own_module(name: str) -> None:
    home = importlib.import_module(f"parallel_core.{parallel_core._HOME_OF[name]}")
    assert name in getattr(home, "__all__", [name])
    if name != "DistributedConfig":  # made anew when other strategies are installed
        assert getattr(parallel_core, name) is getattr(home, name)


def test_type_checkers_see_the_same_names() -> None:
    [block] = [node for node in ast.parse(SOURCE).body if isinstance(node, ast.If)]
    seen = [alias.name for node in ast.walk(block) if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(seen) == sorted(parallel_core.__all__)
    assert len(set(parallel_core.__all__)) == len(parallel_core.__all__)


def test_the_public_names_are_listed() -> None:
    assert set(parallel_core.__all__) <= set(dir(parallel_core))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"^module 'parallel_core' has no attribute 'wrap_modell'$"):
        parallel_core.wrap_modell  # noqa: B018  # the access is the test
    assert not hasattr(parallel_core, "__wrapped__")


def test_a_star_import_brings_the_public_names() -> None:
    names: dict[str, object] = {}
    exec("from parallel_core import *", names)
    assert set(names) - {"__builtins__"} == set(parallel_core.__all__)


def test_the_package_says_its_version() -> None:
    assert importlib.metadata.version("parallel-core") == parallel_core.__version__


@pytest.mark.parametrize(
    "statement",
    [
        "import parallel_core",
        "import parallel_core; dir(parallel_core)",
        "import parallel_core; parallel_core.available_strategies()",
        "from parallel_core import DistributedConfig, hookimpl, StateDictType, StrategyConfig, load_config, WrapError",
        "import parallel_core; parallel_core.DistributedConfig()",
    ],
)
def test_torch_is_not_imported_by(statement: str, tmp_path: Path) -> None:
    code = f"{statement}\nimport sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False, timeout=60).returncode == 0
