"""The documentation, read for its tests: prose, sections, tables, and code blocks with what is claimed of them.

A claim is a comment on the line above a block, where no reader sees it:

    <!-- file: train.py -->     the block is this file; all files of a document lie in one folder
    <!-- run -->                the Python block runs, in one process
    <!-- run on 2 ranks -->     the Python block runs on each of 2 ranks, as torchrun would start it
    <!-- prints -->             a text block: what the run of the block before it prints on rank 0; where that raises an
                                error of parallel_core, it follows as `WrapError: ...`
    <!-- refused -->            the settings are not valid; the text block after them is the error
    <!-- table: distributed --> the settings are those in this table of the file
    <!-- tested apart -->       settings of a strategy that one test installs, and checks

Several are parted by commas. A block of settings (toml, yaml, json) without any is a valid configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_BLOCK = re.compile(
    r"(?:^<!-- (?P<claims>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_HEADING = re.compile(r"^#+ (?P<title>.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block; `told` is the text block that says what it prints or which error it gives."""

    document: Document
    line: int
    language: str
    text: str
    claims: dict[str, str] = field(default_factory=dict)
    told: str | None = None

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def file_name(self) -> str:
        return self.claims.get("file", "example.py" if self.language == "python" else f"parallel.{self.language}")

    @property
    def ranks(self) -> int | None:
        """On how many ranks the block runs; 0 for one process without a launcher, None where it does not run."""
        how = next((claim for claim in self.claims if claim.startswith("run")), None)
        return None if how is None else int((re.search(r"\d+", how) or ["0"])[0])


@dataclass(frozen=True)
class Document:
    """One file of the documentation."""

    path: Path

    def __str__(self) -> str:
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The text without code blocks."""
        return _BLOCK.sub("", self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        found: list[Block] = []
        for match in _BLOCK.finditer(self.text):
            parts = (claim.partition(":") for claim in (match["claims"] or "").split(",") if claim.strip())
            claims = {name.strip(): value.strip() for name, _, value in parts}
            if "prints" in claims:
                before = found.pop()
                found.append(Block(self, before.line, before.language, before.text, before.claims, match["text"]))
            else:
                line = self.text.count("\n", 0, match.start("language")) + 1
                found.append(Block(self, line, match["language"], match["text"], claims))
        return found

    @cached_property
    def titles(self) -> list[str]:
        return [match["title"] for match in _HEADING.finditer(self.prose)]

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        """Every row of every table, cells by the name of their column."""
        found: list[dict[str, str]] = []
        header: list[str] = []
        for line in self.prose.splitlines():
            cells = [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not cells or not header:
                header = cells
            elif not all(re.fullmatch(r":?-+:?", cell) for cell in cells):
                found.append(dict(zip(header, cells, strict=True)))
        return found

    def section(self, title: str) -> str:
        """Return what stands under a heading, up to the next one."""
        _, found, rest = f"\n{self.text}".partition(f"# {title}\n")
        assert found, f"{self} has no heading {title!r}"
        following = _HEADING.search(rest)
        return rest[: following.start()] if following else rest

    def write_files(self, folder: Path) -> None:
        for block in self.blocks:
            if "file" in block.claims:
                (folder / block.file_name).write_text(block.text, encoding="utf-8")


def documents() -> Iterator[Document]:
    for pattern in ("*.md", "docs/**/*.md", "plugins/*/README.md"):
        yield from map(Document, sorted(ROOT.glob(pattern)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize what a test asks for by its name: every document, or every code block of a kind."""
    blocks = [block for document in documents() for block in document.blocks]
    kinds: dict[str, list[Document] | list[Block]] = {
        "document": list(documents()),
        "python_block": [block for block in blocks if block.language == "python"],
        "running_block": [block for block in blocks if block.ranks is not None],
        "settings_block": [
            block
            for block in blocks
            if block.language in ("toml", "yaml", "json")
            and block.file_name != "pyproject.toml"
            and "tested apart" not in block.claims
        ],
    }
    for name, values in kinds.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, values, ids=str)


@pytest.fixture
def document_at() -> Callable[[str], Document]:
    """A function that gives the document at a path from the root of the repository."""
    return lambda path: Document(ROOT / path)


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PARALLEL_CORE_"):
            monkeypatch.delenv(name)
