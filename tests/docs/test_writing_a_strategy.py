"""The strategy that the guide writes: built from its code blocks, installed, named in a config, and run."""

from __future__ import annotations

import importlib
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parallel_core import available_strategies, load_config
from parallel_core.registry import registrations
from parallel_core.strategy import bound_strategy
from parallel_core.testing import Ranks

if TYPE_CHECKING:
    from tests.docs.conftest import Document

PIP_LIMIT = 120  # seconds; it takes about three
MODULE = "parallel_core_allreduce"


def look_again() -> None:
    """Make this process find the strategies that are installed now."""
    importlib.invalidate_caches()
    registrations.cache_clear()
    bound_strategy.cache_clear()
    sys.modules.pop(MODULE, None)


@pytest.fixture
def files(document_at: Callable[[str], Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The files of the guide; the distribution that they make is installed."""
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    document_at("docs/guides/writing-a-strategy.md").write_files(source)
    # Without isolation and dependencies: the build backend and the core are here already, nothing is downloaded.
    install = [
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(site),
        str(source),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *install], capture_output=True, text=True, timeout=PIP_LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(str(site))
    look_again()
    yield source
    look_again()


def test_the_strategy_of_the_guide_is_found_and_passes_the_test_of_the_guide(files: Path) -> None:
    (found,) = (strategy for strategy in available_strategies() if strategy.name == "allreduce")
    assert (found.distribution, found.error) == ("parallel-core-allreduce", None)
    config = load_config(files / "parallel.toml", environ={})
    assert (config.parallel_strategy, config.options.bf16_gradients) == ("allreduce", True)  # type: ignore[attr-defined]  # the guide's

    tests = runpy.run_path(str(files / "test_allreduce.py"), run_name="test_allreduce")
    # Ranks of its own: those of the test run have looked already which strategies there are.
    with Ranks() as ranks:
        tests["test_two_ranks_train_like_one_process"](ranks)
