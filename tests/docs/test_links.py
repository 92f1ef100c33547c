"""What the documentation points to is there: links, files, targets of make, commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from parallel_core.cli import main

if TYPE_CHECKING:
    from tests.docs.conftest import Document

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]+\]\((?P<target>[^)\s]+)\)")
CODE = re.compile(r"`(?P<code>[^`\n]+)`")
# A path from the root of the repository; `<name>` in one stands for any name.
PATH = re.compile(
    r"(?:parallel_core|plugins|tests|docs|examples|benchmarks|\.ci)/[\w./<>-]*|[\w.]+\.(?:md|txt)|\.ci/run"
)
MADE_BY_EXAMPLES = {"my_module"}


def commands_of(document: Document) -> Iterator[str]:
    """Yield every piece of code in the prose, and every line of a shell block."""
    yield from (match["code"] for match in CODE.finditer(document.prose))
    for block in document.blocks:
        if block.language == "sh":
            yield from block.text.splitlines()


def anchor_of(title: str) -> str:
    """Return the anchor that a heading gets where Markdown is shown, as on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_a_link_leads_to_a_file_and_a_heading_that_are_there(
    document: Document, document_at: Callable[[str], Document]
) -> None:
    for match in LINK.finditer(document.prose):
        target, _, anchor = match["target"].partition("#")
        if target.startswith("https:"):
            continue
        path = (document.path.parent / target).resolve() if target else document.path
        assert path.exists(), f"{document} links to {match['target']}: there is no {path}"
        if anchor:
            anchors = [anchor_of(title) for title in document_at(str(path.relative_to(ROOT))).titles]
            assert anchor in anchors, f"{document} links to {match['target']}: headings there are {anchors}"


def test_a_file_that_is_named_is_there(document: Document) -> None:
    for code in commands_of(document):
        for word in code.split():
            if PATH.fullmatch(word):
                found = list(ROOT.glob(re.sub(r"<\w+>", "*", word).rstrip("/")))
                assert found, f"{document} names {word}, which is not there"


def test_a_target_of_make_that_is_named_is_there(document: Document) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for command in commands_of(document):
        if found := re.match(r"make ([a-z]+)", command):
            assert found[1] in targets, f"{document} names make {found[1]}"


def test_a_command_that_is_named_is_there(document: Document, capsys: pytest.CaptureFixture[str]) -> None:
    for command in commands_of(document):
        if found := re.match(r"parallel-core ([a-z-]+)", command):
            with pytest.raises(SystemExit) as ended:
                main([found[1], "--help"])
            assert ended.value.code == 0, capsys.readouterr().err


def test_nothing_is_put_off(document: Document) -> None:
    assert not re.search(r"coming soon|\bTODO\b|\bTBD\b|\bFIXME\b", document.text, re.IGNORECASE)
