"""The strategy that the guide writes: built from its code blocks, installed, named in a config, and run."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parallel_core import available_strategies, load_config
from parallel_core.testing import Ranks
from tests.commands import install

if TYPE_CHECKING:
    from tests.docs.conftest import Document

MODULE = "parallel_core_allreduce"


@pytest.fixture
def files(document_at: Callable[[str], Document], visible: Callable[[Path, str], None], tmp_path: Path) -> Path:
    """The files of the guide; the distribution that they make is installed."""
    source = tmp_path / "source"
    source.mkdir()
    document_at("docs/guides/writing-a-strategy.md").write_files(source)
    install(source, tmp_path / "site")
    visible(tmp_path / "site", MODULE)
    return source


def test_the_strategy_of_the_guide_is_found_and_passes_the_test_of_the_guide(files: Path, ranks: Ranks) -> None:
    (found,) = (strategy for strategy in available_strategies() if strategy.name == "allreduce")
    assert (found.distribution, found.error) == ("parallel-core-allreduce", None)
    config = load_config(files / "parallel.toml", environ={})
    assert (config.parallel_strategy, config.options.bf16_gradients) == ("allreduce", True)  # type: ignore[attr-defined]  # the guide's

    tests = runpy.run_path(str(files / "test_allreduce.py"), run_name="test_allreduce")
    tests["test_two_ranks_train_like_one_process"](ranks)
