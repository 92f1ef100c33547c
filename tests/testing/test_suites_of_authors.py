"""The suites of strategies from elsewhere, run as their authors run them: with pytest, where they are installed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from parallel_core.skeleton import write_skeleton
from tests.commands import SUITE_LIMIT, install, python

THIRD_PARTY = Path(__file__).parents[2] / "examples" / "third_party"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints for the smallest strategy and for a new one, in one run that shares its ranks."""
    folder = tmp_path_factory.mktemp("authors")
    write_skeleton("sketch", folder / "sketch")
    shutil.copytree(THIRD_PARTY, folder / "localsgd", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("sketch", "localsgd"):
        install(folder / name, folder / "site")
    options = ("-q", "-W", "error", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", folder)
    suites = (folder / "sketch" / "tests", folder / "localsgd" / "tests")
    site = str(folder / "site")
    return python("-m", "pytest", *options, *suites, cwd=folder, limit=SUITE_LIMIT, PYTHONPATH=site)


def test_both_pass_with_a_column_each_in_the_table(report: str) -> None:
    assert re.search(r"^clause +localsgd +sketch$", report, re.MULTILINE), report


def test_a_clause_that_asks_nothing_of_either_is_not_in_the_table(report: str) -> None:
    assert "refuses what it declares to refuse" not in report


@pytest.mark.parametrize(
    ("clause", "localsgd", "sketch"),
    [
        ("full state is the bare models", "kept", "kept"),
        ("trains as one process does", "lacks", "kept"),
        ("shares the parameters among the ranks", "lacks", "lacks"),
        ("tied parameters stay tied", "kept", "kept"),
    ],
)
def test_the_table_says_what_each_keeps_and_lacks(report: str, clause: str, localsgd: str, sketch: str) -> None:
    assert re.search(rf"^{clause} +{localsgd} +{sketch}$", report, re.MULTILINE), report
