"""What `parallel-core new-strategy` writes: a distribution that works as it is, or nothing at all."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from torch import nn

import parallel_core
from parallel_core import StrategyError, wrap_model_for_training
from parallel_core import ranks as collective
from parallel_core.cli import main
from parallel_core.skeleton import FILES, write_skeleton
from parallel_core.testing import Ranks
from tests.commands import install, python

ROOT = Path(__file__).parents[1]
TEMPLATES = ROOT / "parallel_core" / "skeleton" / "template"


@pytest.fixture
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_the_files_of_a_distribution_are_written_and_named(
    working_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-strategy", "sketch"]) == 0
    files = [
        "parallel-core-sketch/pyproject.toml",
        "parallel-core-sketch/README.md",
        "parallel-core-sketch/parallel_core_sketch.py",
        "parallel-core-sketch/tests/test_conformance.py",
    ]
    assert sorted(map(str, Path().rglob("*.*"))) == sorted(files)
    assert capsys.readouterr().out.splitlines() == [
        "wrote the strategy 'sketch':",
        *(f"  {file}" for file in files),
        "next: pip install --editable 'parallel-core-sketch[testing]' && pytest parallel-core-sketch",
    ]


def test_the_distribution_registers_the_strategy_and_asks_for_this_core(working_directory: Path) -> None:
    write_skeleton("sketch", working_directory / "elsewhere")
    project = tomllib.loads((working_directory / "elsewhere" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "parallel-core-sketch"
    assert project["entry-points"] == {"parallel_core.strategies": {"sketch": "parallel_core_sketch"}}
    core = Requirement(project["dependencies"][0])
    assert core.name == "parallel-core"
    assert core.specifier.contains(parallel_core.__version__)
    assert not core.specifier.contains("999.0")


def test_every_template_is_used() -> None:
    assert sorted(path.name for path in TEMPLATES.iterdir()) == sorted(FILES.values())


@pytest.mark.parametrize("name", ["a", "sketch", "x" * 40])
def test_ruff_has_nothing_to_say_about_it(name: str, working_directory: Path) -> None:
    write_skeleton(name, Path("new"))
    for rules in (["--isolated"], ["--config", str(ROOT / "pyproject.toml")]):
        # A short name must not leave room for what was broken into lines, nor a long one need more lines.
        python("-m", "ruff", "format", "--no-cache", "--check", *rules, "new", cwd=working_directory)
        lengths = ["--ignore", "E501"] if len(name) > 30 else []
        python("-m", "ruff", "check", "--no-cache", *rules, *lengths, "new", cwd=working_directory)


def test_mypy_has_nothing_to_say_about_it(working_directory: Path) -> None:
    write_skeleton("sketch", Path("new"))
    # A cache that lasts, beside that of the project: without one, mypy reads all of torch each time.
    cache = ROOT / ".mypy_cache" / "skeleton"
    python("-m", "mypy", "--strict", "--cache-dir", cache, ".", cwd=working_directory / "new")


def test_its_setting_changes_what_it_says(
    ranks: Ranks, visible: Callable[[Path, str], None], working_directory: Path
) -> None:
    def work(bf16: bool) -> torch.Tensor:
        config = parallel_core.DistributedConfig(parallel_strategy="sketch", sketch_bf16_gradients=bf16)
        model = wrap_model_for_training(nn.Linear(3, 1, bias=False), config)
        assert model is not None
        model(torch.full((1, 3), 1 / 3 + collective.rank())).sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        return gradient

    write_skeleton("sketch", working_directory / "new")
    install(working_directory / "new", working_directory / "site")
    visible(working_directory / "site", "parallel_core_sketch")
    mean = torch.full((1, 3), 1 / 3 + 1 / 2)
    for gradient in ranks(work, False):
        torch.testing.assert_close(gradient, mean)
    for gradient in ranks(work, True):
        assert torch.equal(gradient, gradient.bfloat16().float())
        torch.testing.assert_close(gradient, mean, atol=2**-7, rtol=0)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Local-SGD", "allowed are lower-case letters and digits, a letter first; did you mean 'localsgd'?"),
        ("4d", "allowed are lower-case letters and digits, a letter first; did you mean 'd'?"),
        ("-", "allowed are lower-case letters and digits, a letter first"),
        ("", "allowed are lower-case letters and digits, a letter first"),
        ("lambda", "it is a keyword of Python; choose another name"),
    ],
)
def test_a_name_that_no_strategy_can_have_is_refused(name: str, problem: str, working_directory: Path) -> None:
    with pytest.raises(StrategyError) as caught:
        write_skeleton(name)
    assert str(caught.value) == f"{name!r} can't be the name of a strategy: {problem}"
    assert not list(working_directory.iterdir())


def test_the_name_of_an_installed_strategy_is_refused(
    install_strategy: Callable[..., str], working_directory: Path
) -> None:
    install_strategy("sketch", distribution="pc-sketch")
    with pytest.raises(StrategyError, match=r"^a strategy 'sketch' \(pc-sketch 1.0\) is installed already; choose"):
        write_skeleton("sketch")
    assert not list(working_directory.iterdir())


@pytest.mark.parametrize("make", [Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")])
def test_nothing_is_overwritten(
    make: Callable[[Path], None], working_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = working_directory / "parallel-core-sketch"
    make(there)
    assert main(["new-strategy", "sketch"]) == 2
    message = "parallel-core-sketch is there already, and nothing is overwritten; name another with --folder"
    assert capsys.readouterr().err == f"error: {message}\n"
    assert list(working_directory.rglob("*")) == [there]


def test_a_folder_is_made_in_one_that_is_there(working_directory: Path) -> None:
    with pytest.raises(StrategyError, match=r"^there is no folder nowhere to make new in; make it, or name another$"):
        write_skeleton("sketch", Path("nowhere/new"))
    assert not list(working_directory.iterdir())


@pytest.mark.parametrize("folder", ["a" * 300, f"{'a' * 300}/new", "a\0b"])
def test_a_name_that_no_folder_can_have_is_refused(folder: str, working_directory: Path) -> None:
    with pytest.raises(StrategyError, match=r"can't be written: .*(name too long|null byte).*; name another with"):
        write_skeleton("sketch", Path(folder))
    assert not list(working_directory.iterdir())


def test_a_write_that_fails_leaves_nothing(working_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text = Path.write_text

    def full(path: Path, *arguments: object, **options: object) -> int:
        if path.name == "test_conformance.py":  # the last one
            raise OSError(28, "No space left on device")
        return write_text(path, *arguments, **options)  # type: ignore[arg-type]  # handed on as they came

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(StrategyError, match=r"^new can't be written: .*No space left on device; name another with"):
        write_skeleton("sketch", Path("new"))
    assert not list(working_directory.iterdir())
