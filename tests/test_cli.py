"""The command `parallel-core`: what it prints, where, and with which exit code."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel_core.cli import main

pytestmark = pytest.mark.usefixtures("only_fakes")


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.usefixtures("ddp_and_fsdp")
def test_strategies_lists_each_one_and_why_it_can_not_be_used(
    install_strategy: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    install_strategy("bad", "import nosuch  # [bold]", distribution="pc-bad")
    assert main(["strategies"]) == 0
    assert lines(capsys.readouterr().out) == [
        "name  distribution        version  status",
        (
            "bad   pc-bad              1.0      strategy 'bad' (pc-bad 1.0) failed to load from 'fake_bad_pc_bad': "
            "ModuleNotFoundError: No module named 'nosuch'; repair or uninstall pc-bad"
        ),
        "ddp   parallel-core-ddp   0.1.0    ready",
        "fsdp  parallel-core-fsdp  0.1.0    ready",
    ]


def test_strategies_says_so_where_none_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies"]) == 0
    assert capsys.readouterr().out.startswith("no strategy is installed; `pip install parallel-core[all]`")


def test_config_prints_each_setting_its_value_and_where_it_came_from(
    install_strategy: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = 'on: bool = False\nnames: tuple[str, ...] = ("[red]",)\nlimit: int | None = None'
    install_strategy("demo", settings=settings)
    monkeypatch.chdir(tmp_path)
    Path("parallel.toml").write_text('[distributed]\nbackend = "gloo"\n')
    monkeypatch.setenv("PARALLEL_CORE_TIMEOUT_SECONDS", "60")
    assert main(["config", "parallel.toml", "--table", "distributed", "demo_on=true"]) == 0
    assert lines(capsys.readouterr().out) == [
        "setting            value      where it came from",
        'parallel_strategy  "ddp"      default',
        'backend            "gloo"     parallel.toml',
        "timeout_seconds    60.0       environment: PARALLEL_CORE_TIMEOUT_SECONDS",
        "demo_on            true       override",
        'demo_names         ["[red]"]  default',
        "demo_limit         null       default",
    ]


def test_config_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "backend=gloo", "timeout_seconds=5"]) == 0
    assert lines(capsys.readouterr().out)[2:] == [
        'backend            "gloo"  override',
        "timeout_seconds    5.0     override",
    ]


def test_an_invalid_configuration_is_exit_code_2_and_all_its_problems_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["config", "backend=mpi", "timeout_seconds=0"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "error: 2 problems in the configuration:\n"
        "  - override 'backend=mpi': expected one of 'auto', 'nccl' or 'gloo', found 'mpi'\n"
        "  - override 'timeout_seconds=0': expected a number > 0 and <= 31_536_000, found '0'\n"
    )


def test_a_file_whose_name_is_too_long_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    name = f"{'a' * 300}.toml"
    assert main(["config", name]) == 2
    assert capsys.readouterr().err == f"error: {name}: can't be read: File name too long\n"


@pytest.mark.parametrize("arguments", [[], ["config", "--nope"], ["strategies", "more"], ["nope"]])
def test_wrong_arguments_are_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "usage: parallel-core" in capsys.readouterr().err


def test_the_command_does_not_import_torch() -> None:
    code = (
        "import sys; from parallel_core.cli import main; "
        "main(['strategies']); main(['config']); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "False"
