"""The code blocks of the documentation: they compile, they run, and what they are said to print is what they print."""

from __future__ import annotations

import io
import logging
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parallel_core import ConfigError, ParallelCoreError, load_config

if TYPE_CHECKING:
    from parallel_core.testing import Ranks
    from tests.docs.conftest import Block, Document

HOME = "/home/me"  # stands for the folder that a block runs in, where its path is printed


@contextmanager
def logging_of_its_own() -> Iterator[None]:
    """Let a script set up logging as if it were alone in its process."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)


def run_script(path: str) -> str:
    """Run a script and return what it printed, and then what error of parallel_core it ended with."""
    printed = io.StringIO()
    with logging_of_its_own(), redirect_stdout(printed):
        try:
            runpy.run_path(path, run_name="__main__")
        except ParallelCoreError as error:
            print(f"{type(error).__name__}: {error}")
    return printed.getvalue()


def test_a_python_block_compiles(python_block: Block) -> None:
    # The lines before it count, so that an error names the line of the document.
    compile("\n" * python_block.line + python_block.text, str(python_block), "exec")


def test_a_block_runs_and_prints_what_is_shown(
    running_block: Block, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running_block.document.write_files(tmp_path)
    script = tmp_path / running_block.file_name
    script.write_text(running_block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    if running_block.ranks:
        printed = ranks(run_script, str(script), world_size=running_block.ranks, process_group=False)[0]
    else:
        printed = run_script(str(script))
    assert printed.replace(str(tmp_path), HOME) == (running_block.told or "")


@pytest.mark.parametrize("path", ["README.md", "docs/guides/distributed.md"])
def test_the_example_runs_unchanged_under_ddp_and_in_one_process(
    document_at: Callable[[str], Document], path: str, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document_at(path).write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    shown = next(block for block in document_at(path).blocks if block.file_name == "train.py").told
    assert shown is not None
    script = str(tmp_path / "train.py")
    monkeypatch.setenv("PARALLEL_CORE_PARALLEL_STRATEGY", "ddp")
    assert ranks(run_script, script, process_group=False)[0] == shown
    assert run_script(script) == shown.replace("2 ranks", "1 ranks")


def test_settings_are_valid_or_refused_with_the_error_shown(
    settings_block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # for errors name the file as it was given
    Path(settings_block.file_name).write_text(settings_block.text, encoding="utf-8")
    table = settings_block.claims.get("table")
    if "refused" not in settings_block.claims:
        load_config(settings_block.file_name, table, environ={})
        return
    with pytest.raises(ConfigError) as caught:
        load_config(settings_block.file_name, table, environ={})
    assert f"{caught.value}\n" == settings_block.told
