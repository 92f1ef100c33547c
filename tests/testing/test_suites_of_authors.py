"""The suites of strategies from elsewhere, run as their authors run them: with pytest, where they are installed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from parallel_core.skeleton import write_skeleton
from tests.commands import SUITE_LIMIT, install, python

THIRD_PARTY = Path(__file__).parents[2] / "examples" / "third_party"


# Both suites whole: what `make test` knows of these strategies is in the tests of the example and of the skeleton.
pytestmark = pytest.mark.deep

# What the table says of some clauses: of localsgd, and of a new strategy.
CLAUSES = {
    "full state is the bare models": ("kept", "kept"),
    "trains as one process does": ("lacks", "kept"),
    "shares the parameters among the ranks": ("lacks", "lacks"),
    "tied parameters stay tied": ("kept", "kept"),
}


@pytest.fixture(scope="module")
def authors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the smallest strategy and a new one are installed."""
    folder = tmp_path_factory.mktemp("authors")
    write_skeleton("sketch", folder / "sketch")
    shutil.copytree(THIRD_PARTY, folder / "localsgd", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("sketch", "localsgd"):
        install(folder / name, folder / "site")
    return folder


@pytest.fixture(scope="module")
def report(authors: Path) -> str:
    """What pytest prints for both, in one run that shares its ranks; none of their tests fails."""
    quietly = ("-q", "-W", "error", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir", authors)
    suites = (authors / "sketch" / "tests", authors / "localsgd" / "tests")
    return python("-m", "pytest", *quietly, *suites, cwd=authors, limit=SUITE_LIMIT, PYTHONPATH=str(authors / "site"))


def test_both_keep_every_clause_or_lack_it(report: str) -> None:
    rows = re.findall(r"^([a-z0-9 ]+?)  +(kept|lacks) +(kept|lacks)$", report, re.MULTILINE)
    assert len(rows) > 50, report
    assert "BROKEN" not in report


def test_both_have_a_column_in_the_table(report: str) -> None:
    assert re.search(r"^clause +localsgd +sketch$", report, re.MULTILINE), report


@pytest.mark.parametrize("clause", CLAUSES)
def test_the_table_says_what_each_keeps_and_lacks(report: str, clause: str) -> None:
    localsgd, sketch = CLAUSES[clause]
    assert re.search(rf"^{clause} +{localsgd} +{sketch}$", report, re.MULTILINE), report
