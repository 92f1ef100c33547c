"""The guide to testing says what the kit says, and its tests do what is said of them."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from parallel_core.testing import Ranks, RanksFailed
from parallel_core.testing.conformance import Capability, Declaration, StrategyConformance

if TYPE_CHECKING:
    from tests.docs.conftest import Block, Document

GUIDE = "docs/guides/testing-a-strategy.md"


@pytest.fixture
def guide(document_at: Callable[[str], Document]) -> Document:
    return document_at(GUIDE)


def block_of(guide: Document, file: str) -> Block:
    (found,) = (block for block in guide.blocks if block.claims.get("file") == file)
    return found


def named_tests(guide: Document, file: str, folder: Path) -> dict[str, Any]:
    """Return the tests of a block, by name."""
    path = folder / file
    path.write_text(block_of(guide, file).text, encoding="utf-8")
    names = runpy.run_path(str(path), run_name=path.stem)
    return {name: value for name, value in names.items() if name.startswith(("test_", "Test"))}


def column(guide: Document, header: str) -> list[str]:
    return [row[header].strip("`") for row in guide.rows if header in row]


def clauses() -> Iterator[tuple[str, str]]:
    """Yield every clause of the kit, as the guide is to have it."""
    for base in StrategyConformance.__bases__:
        for name, value in vars(base).items():
            if name.startswith("test_"):
                yield name.removeprefix("test_").replace("_", " "), " ".join((inspect.getdoc(value) or "").split())


def test_every_clause_is_listed_with_what_its_docstring_says(guide: Document) -> None:
    assert [(row["clause"], row["what it says"]) for row in guide.rows if "clause" in row] == list(clauses())


def test_every_group_of_clauses_has_its_heading(guide: Document) -> None:
    expected = [(inspect.getdoc(base) or "").rstrip(".") for base in StrategyConformance.__bases__]
    assert [title for title in guide.titles if title in expected] == expected


def test_every_capability_is_listed_with_its_meaning(guide: Document) -> None:
    listed = [(row["capability"], row["what it means to have it"]) for row in guide.rows if "capability" in row]
    assert listed == [(f"`{capability.name}`", capability.value) for capability in Capability]


def test_every_declaration_is_listed(guide: Document) -> None:
    assert column(guide, "attribute") == [name for name in Declaration.__annotations__ if not name.startswith("_")]


def test_every_argument_of_a_call_is_listed_with_its_default(guide: Document) -> None:
    parameters = inspect.signature(Ranks.__call__).parameters.values()
    options = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
    rows = [(row["argument"].strip("`"), row["default"].strip("`")) for row in guide.rows if "argument" in row]
    assert rows == [(option.name, repr(option.default)) for option in options]


@pytest.mark.parametrize("file", ["test_ranks.py", "test_outcomes.py"])
def test_the_tests_of_the_guide_pass(guide: Document, file: str, ranks: Ranks, tmp_path: Path) -> None:
    tests = named_tests(guide, file, tmp_path)
    assert tests
    for test in tests.values():
        test(ranks)


def test_a_failure_is_told_as_the_guide_shows(guide: Document, ranks: Ranks, tmp_path: Path) -> None:
    shown = block_of(guide, "test_failing.py").told
    assert shown is not None
    (test,) = named_tests(guide, "test_failing.py", tmp_path).values()
    with pytest.raises(RanksFailed) as caught:
        test(ranks)
    assert str(caught.value).startswith(shown)


def test_the_conformance_class_of_the_guide_declares_what_the_kit_knows(guide: Document, tmp_path: Path) -> None:
    (found,) = (
        value for name, value in named_tests(guide, "test_conformance.py", tmp_path).items() if name.startswith("Test")
    )
    assert issubclass(found, StrategyConformance)
    assert found.config("unused_parameter").options.find_unused_parameters is True
