"""The main job, run as a user runs it: by torchrun, and plainly; and, where a test needs many runs, on pooled ranks."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel_core.testing import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_lm.py"
LIMIT = 120.0  # seconds; many times what a run takes on two slow cores: it ends a hang and measures nothing

# A model of two blocks, each of which is a unit of its own by the override at the end.
TINY = (
    *("--width", "16", "--depth", "2", "--heads", "2", "--context", "16", "--batch", "12"),
    *("--learning-rate", "0.03", "--sample", "20", "--report-every", "1", "fsdp_auto_wrap_min_params=3_000"),
)
STEPS = 6

# What would lead the processes started here to the ranks of this test run, or to a user's own settings.
LEAKING = re.compile(r"PARALLEL_CORE|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_\w+)$")

Train = Callable[..., list[float]]


def command(*arguments: str | Path, ranks: int | None = None) -> list[str]:
    """Return the command that trains on a number of ranks, or without a launcher."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    return [sys.executable, *launcher, str(SCRIPT), *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not LEAKING.match(name)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | more


@contextmanager
def launched(*arguments: str | Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a run that never ends by itself; give torchrun's process and the ranks' ids once they train."""
    process = subprocess.Popen(
        command(*TINY, *arguments, "--steps", "1000000", ranks=2),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal's job: a group of its own, which Ctrl-C reaches whole
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 3/"):
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        yield process, [int(pid) for pid in children.split()]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def assert_all_end(pids: list[int]) -> None:
    deadline = time.monotonic() + LIMIT
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"processes left behind: {left}"


needs_proc = pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")


@pytest.fixture(autouse=True)
def examples_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def train(ranks: Ranks, tmp_path: Path) -> Train:
    """Train on pooled ranks: `train("fsdp", 2, "--resume", run)` returns the loss of every step."""

    def train(strategy: str, world_size: int, *arguments: str | Path, steps: int = STEPS) -> list[float]:
        # A run that resumes names its folder, any other gets its own.
        is_placed = {"--resume", "--output"} & set(arguments)
        place = () if is_placed else ("--output", tmp_path / f"{strategy}-on-{world_size}")
        line = [*TINY, "--steps", str(steps), *map(str, (*place, *arguments))]

        def work() -> list[float]:
            import train_lm

            return train_lm.main(line)

        # Not the pool's own process group: the script makes one, from the environment that torchrun would have set.
        env = {"PARALLEL_CORE_PARALLEL_STRATEGY": strategy}
        losses = ranks(work, world_size=world_size, process_group=False, env=env)
        assert all(other == losses[0] for other in losses), "the ranks report different losses"
        return list(losses[0])

    return train


def test_one_command_trains_on_two_ranks_and_saves_what_any_tool_can_open(tmp_path: Path) -> None:
    arguments = (
        *TINY,
        "--steps",
        "40",
        "--report-every",
        "10",
        "--learning-rate",
        "0.03",
        "--output",
        tmp_path / "run",
    )
    done = subprocess.run(
        command("--config", EXAMPLES / "parallel.toml", *arguments, ranks=2),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # Who holds what: half each, and nothing twice.
    whole = re.search(r"([\d,]+) parameters, strategy fsdp, 2 ranks", done.stdout)
    held = re.findall(r"^ +[01] +cpu +([\d,]+) +[\d.]+%", done.stdout, re.MULTILINE)
    assert whole, done.stdout
    counts = [int(text.replace(",", "")) for text in (*held, whole[1])]
    assert len(counts) == 3
    assert counts[0] + counts[1] == counts[2]
    assert abs(counts[0] - counts[1]) <= 2
    # Progress in lines, as this is no terminal, from one rank alone.
    steps = re.findall(r"^step (\d+)/40  loss [\d.]+  [\d,]+ tokens/s  \d:\d\d:\d\d left$", done.stdout, re.MULTILINE)
    assert steps == ["1", "10", "20", "30", "40"]
    # It learns, and says so last.
    verdict = re.fullmatch(r"loss [\d.]+ -> [\d.]+ \((\d+)% of its start\)", done.stdout.splitlines()[-1])
    assert verdict, done.stdout
    assert int(verdict[1]) < 75  # the demo's model, in the demo's time, gets below 60
    # The weights are a bare model's.
    from byte_lm import ByteLM

    weights = load_file(tmp_path / "run" / "step-00000040" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    ByteLM(width=16, depth=2, heads=2, context=16).load_state_dict(weights)


def test_the_script_runs_without_a_launcher(tmp_path: Path) -> None:
    done = subprocess.run(
        command(*TINY, "--steps", "2"),
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert re.search(r"^ +0 +cpu +[\d,]+ +100.0%", done.stdout, re.MULTILINE)
    assert list(tmp_path.glob("runs/*/step-00000002/model.safetensors"))


@pytest.mark.parametrize(
    ("strategy", "world_size", "settings"),
    [
        ("ddp", 2, ()),
        ("ddp", 3, ()),
        ("fsdp", 2, ()),
        ("fsdp", 3, ()),
        ("fsdp", 2, ("fsdp_auto_wrap_min_params=0",)),  # every module a unit: none may be read without being called
    ],
)
def test_every_strategy_gives_the_losses_of_one_process(
    train: Train, strategy: str, world_size: int, settings: tuple[str, ...]
) -> None:
    alone = train("ddp", 1)
    assert len(alone) == STEPS
    # Sums in another order; each step starts from the last one's rounding.
    assert train(strategy, world_size, *settings) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("strategy", "world_size", "precision"),
    [("ddp", 1, "fp32"), ("ddp", 2, "fp32"), ("fsdp", 2, "fp32"), ("fsdp", 2, "fp16")],
)
def test_a_resumed_run_gives_the_losses_of_an_uninterrupted_one(
    train: Train, tmp_path: Path, strategy: str, world_size: int, precision: str
) -> None:
    setting = f"fsdp_mixed_precision={precision}"
    whole = train(strategy, world_size, setting, "--output", tmp_path / "whole")
    first = train(strategy, world_size, setting, "--output", tmp_path / "cut", steps=2)
    rest = train(strategy, world_size, setting, "--resume", tmp_path / "cut")
    assert first + rest == whole
    assert [folder.name for folder in (tmp_path / "cut").iterdir()] == [f"step-{STEPS:08}"]


def test_a_run_can_be_resumed_under_another_strategy_and_on_other_ranks(train: Train, tmp_path: Path) -> None:
    whole = train("ddp", 1)
    cut = tmp_path / "cut"
    losses = train("fsdp", 2, "--output", cut, steps=2)
    losses += train("ddp", 2, "--resume", cut, steps=4)
    losses += train("fsdp", 3, "--resume", cut)
    assert losses == pytest.approx(whole, abs=1e-5)


def test_a_finished_run_can_be_resumed_to_write_a_sample(train: Train, tmp_path: Path) -> None:
    train("fsdp", 2, "--output", tmp_path / "run")
    assert train("fsdp", 2, "--resume", tmp_path / "run") == []


def test_a_save_that_was_cut_off_is_no_saved_run(train: Train, tmp_path: Path) -> None:
    train("ddp", 1, "--output", tmp_path / "run", steps=2)
    (tmp_path / "run" / "unfinished").mkdir()
    (tmp_path / "run" / "unfinished" / "model.safetensors").write_bytes(b"half of a")
    assert len(train("ddp", 1, "--resume", tmp_path / "run", steps=3)) == 1


def test_a_failure_to_save_on_one_rank_is_raised_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = [*TINY, "--steps", "1", "--output", str(tmp_path / "file" / "run")]

    def work() -> None:
        import train_lm

        train_lm.main(line)

    outcomes = ranks.outcomes(work, process_group=False)
    assert [outcome.status for outcome in outcomes] == ["raised", "raised"]
    assert {outcome.message for outcome in outcomes} == {outcomes[0].message}
    assert "NotADirectoryError" in outcomes[0].message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere"), "--data nowhere: no such file or folder"),
        (("--batch", "5"), "--batch 5 can't be cut into 1 shares of 2 micro-batches"),
        (("--max-bytes", "16"), "has 16 bytes of text, and a context of 16 needs more"),
        (("--resume", "nowhere"), "no saved run in nowhere"),
        (("--output", "run"), "--output run holds a saved run"),
        (("parallel_strategy=fdsp",), "did you mean 'fsdp'?"),
    ],
)
def test_what_can_not_be_done_is_refused_with_its_reason(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import train_lm

    for name in filter(LEAKING.match, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    Path("run/step-00000001").mkdir(parents=True)
    with pytest.raises((SystemExit, Exception)) as caught:
        train_lm.main([*TINY, "--steps", "1", *arguments])
    assert message in f"{caught.value}{capsys.readouterr().err}"


@needs_proc
@pytest.mark.parametrize("pressed_in_a_terminal", [True, False])
def test_an_interrupt_leaves_no_process_behind_and_no_traceback_of_a_rank(
    tmp_path: Path, pressed_in_a_terminal: bool
) -> None:
    with launched("--output", tmp_path / "run") as (process, ranks):
        assert len(ranks) == 2
        if pressed_in_a_terminal:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT)
        assert process.returncode != 0
        assert_all_end(ranks)
    # torch marks what a rank's uncaught exception prints.
    assert "[rank" not in output


@needs_proc
def test_a_rank_that_dies_takes_the_job_down_and_is_named(tmp_path: Path) -> None:
    with launched("--output", tmp_path / "run") as (process, ranks):
        os.kill(ranks[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=LIMIT)
        assert process.returncode != 0
        assert_all_end(ranks)
    _, _, cause = output.partition("Root Cause")
    assert re.search(r"rank +: 1 ", cause), output
    assert "(SIGKILL)" in cause


@pytest.mark.parametrize("file", ["train_lm.py", "byte_lm.py", "saved_run.py", "display.py"])
def test_the_script_names_no_strategy(file: str) -> None:
    source = (EXAMPLES / file).read_text(encoding="utf-8").lower()
    assert "fsdp" not in source
    assert "ddp" not in source


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere() -> None:
    from display import progress
    from rich.console import Console

    shown = {}
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
        with progress(console, range(4, 10), every=3) as report:
            for step in range(4, 10):
                report(step, 2.5, 100)
        shown[is_terminal] = console.file.getvalue()  # type: ignore[attr-defined]  # the StringIO from above
    assert re.search(r"step 10/10 .*━.*loss 2.5000", shown[True])
    lines = [re.sub(r"[\d,]+ tokens/s", "R tokens/s", line) for line in shown[False].splitlines()]
    assert lines == [f"step {step}/10  loss 2.5000  R tokens/s  0:00:00 left" for step in (5, 6, 9, 10)]


def test_text_is_read_from_files_in_order_and_up_to_the_limit(tmp_path: Path) -> None:
    from byte_lm import read_text

    for name, content in {
        "b.txt": b"second ",
        "a/x.py": b"third ",
        "a.md": b"first ",
        "tests/t.py": b"no",
        "site-packages/s.py": b"no",
        ".hidden": b"no",
        "image": b"no\0text",
        "z.txt": b"",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link").symlink_to("nowhere")
    assert bytes(read_text(tmp_path, 1000).tolist()) == b"first second third "
    assert bytes(read_text(tmp_path, 8).tolist()) == b"first se"
    assert bytes(read_text(tmp_path / "b.txt", 1000).tolist()) == b"second "
    assert len(read_text(tmp_path / "z.txt", 1000)) == 0
