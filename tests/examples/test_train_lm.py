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
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parallel_core.testing import Ranks, RanksFailed

# To measure takes half as long again as to run, and what runs here is measured where it is tried by itself.
pytestmark = pytest.mark.no_cover

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
    """Train on pooled ranks: `train("fsdp", 2, "--output", run)` returns the loss of every step.

    `shown` is a list that gets what each rank printed.
    """

    def train(
        strategy: str, world_size: int, *arguments: str | Path, steps: int = STEPS, shown: list[str] | None = None
    ) -> list[float]:
        # A run that is to go on names its folder, any other gets one of its own.
        place = () if "--output" in arguments else ("--output", tmp_path / f"{strategy}-on-{world_size}")
        line = [*TINY, "--strategy", strategy, "--steps", str(steps), *map(str, (*place, *arguments))]

        def work() -> tuple[list[float], str]:
            import train_lm

            with redirect_stdout(io.StringIO()) as printed:
                return train_lm.main(line), printed.getvalue()

        # Not the pool's own process group: the script makes one, from the environment that torchrun would have set.
        answers = ranks(work, world_size=world_size, process_group=False)
        losses = [each for each, _ in answers]
        assert all(other == losses[0] for other in losses), "the ranks report different losses"
        if shown is not None:
            shown += [printed for _, printed in answers]
        return list(losses[0])

    return train


@pytest.fixture(scope="module")
def known() -> list[list[float]]:
    """What `alone` has found."""
    return []


@pytest.fixture
def alone(train: Train, known: list[list[float]]) -> list[float]:
    """The losses of one process, which every run is to have; it is run once."""
    if not known:
        known.append(train("ddp", 1))
    return known[0]


@needs_proc
def test_a_killed_run_goes_on_from_its_last_complete_checkpoint_under_another_strategy(
    train: Train, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with launched("--output", run, "--save-every", "2") as (process, ranks):
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        output, _ = process.communicate(timeout=LIMIT)
        assert process.returncode != 0
        assert_all_end(ranks)
    # The rank that died took the job down, and is named.
    _, _, cause = output.partition("Root Cause")
    assert re.search(r"rank +: 1 ", cause), output
    assert "(SIGKILL)" in cause

    # As if it had died while it saved: no checkpoint, and none of these files is to be read.
    unfinished = run / ".step-999999.saving-0123abcd"
    unfinished.mkdir()
    (unfinished / "model.safetensors").write_bytes(b"half of a")
    [*_, last] = sorted(run.glob("step-*"))
    first_step = int(last.name.removeprefix("step-"))
    assert first_step >= 2
    steps = first_step + 3
    shown: list[str] = []
    losses = train("ddp", 2, "--output", run, steps=steps, shown=shown)
    printed = shown[0]
    assert f"going on from {last}; another --output starts a new run" in printed
    assert re.search(r"[\d,]+ parameters, strategy ddp, 2 ranks", printed), printed
    assert not unfinished.exists()
    # Progress in lines, as this is no terminal, from one rank alone.
    lines = re.findall(
        rf"^step (\d+)/{steps}  loss ([\d.]+)  [\d,]+ tokens/s  \d:\d\d:\d\d left$", printed, re.MULTILINE
    )
    assert "step" not in shown[1]
    assert [int(step) for step, _ in lines] == [first_step + 1, first_step + 2, steps]
    # The losses of a run that nobody has killed.
    assert losses == pytest.approx(train("ddp", 1, steps=steps)[first_step:], abs=1e-4)
    assert [float(loss) for _, loss in lines] == pytest.approx(losses, abs=1e-2)
    # It learns, and says so last; after where it was saved.
    *_, saved, verdict = printed.splitlines()
    assert saved == f"saved in {run / f'step-{steps:06}'}"
    assert re.fullmatch(r"loss [\d.]+ -> [\d.]+ \(\d+% of its start\)", verdict)


def test_two_ranks_hold_half_each_learn_and_save_what_any_tool_can_open(train: Train, tmp_path: Path) -> None:
    shown: list[str] = []
    losses = train("fsdp", 2, "--report-every", "10", "--output", tmp_path / "run", steps=40, shown=shown)
    # Who holds what: half each, and nothing twice.
    whole = re.search(r"([\d,]+) parameters, strategy fsdp, 2 ranks", shown[0])
    held = re.findall(r"^ +[01] +cpu +([\d,]+) +[\d.]+%", shown[0], re.MULTILINE)
    assert whole, shown[0]
    counts = [int(text.replace(",", "")) for text in (*held, whole[1])]
    assert len(counts) == 3
    assert counts[0] + counts[1] == counts[2]
    assert abs(counts[0] - counts[1]) <= 2
    assert shown[1] == "", "only one rank speaks"
    assert re.findall(r"^step (\d+)/40 ", shown[0], re.MULTILINE) == ["1", "10", "20", "30", "40"]
    verdict = re.fullmatch(r"loss [\d.]+ -> [\d.]+ \((\d+)% of its start\)", shown[0].splitlines()[-1])
    assert verdict, shown[0]
    assert int(verdict[1]) == round(100 * sum(losses[-10:]) / 10 / losses[0])
    assert int(verdict[1]) < 75  # the demo's model, in the demo's time, gets below 60
    # The weights are a bare model's.
    from byte_lm import ByteLM

    weights = load_file(tmp_path / "run" / "step-000040" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    ByteLM(width=16, depth=2, heads=2, context=16).load_state_dict(weights)


def test_a_run_without_a_launcher_makes_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import train_lm

    for name in filter(LEAKING.match, list(os.environ)):
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    assert len(train_lm.main([*TINY, "--steps", "2"])) == 2
    shown = capsys.readouterr().out
    assert re.search(r"[\d,]+ parameters, strategy none, 1 rank ", shown)
    assert re.search(r"^ +0 +cpu +[\d,]+ +100.0%", shown, re.MULTILINE)
    assert list(tmp_path.glob("runs/*/step-000002/model.safetensors"))


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
    train: Train, alone: list[float], strategy: str, world_size: int, settings: tuple[str, ...]
) -> None:
    assert len(alone) == STEPS
    # Sums in another order; each step starts from the last one's rounding.
    assert train(strategy, world_size, *settings) == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("strategy", "world_size", "precision"),
    [
        ("ddp", 1, "fp32"),
        ("ddp", 2, "fp32"),
        ("fsdp", 2, "fp16"),  # with the scale of the gradients, which has to go on as well
        pytest.param("fsdp", 2, "fp32", marks=pytest.mark.deep),
    ],
)
def test_a_resumed_run_gives_the_losses_of_an_uninterrupted_one(
    train: Train, tmp_path: Path, strategy: str, world_size: int, precision: str
) -> None:
    setting = f"fsdp_mixed_precision={precision}"
    cut = tmp_path / "cut"
    whole = train(strategy, world_size, setting, "--output", tmp_path / "whole")
    first = train(strategy, world_size, setting, "--output", cut, "--save-every", "1", steps=3)
    rest = train(strategy, world_size, setting, "--output", cut, "--state-dict-type", "sharded")
    assert first + rest == whole
    # Two of the run are kept, whoever saved them; the last of each start is of the kind that was asked for.
    assert sorted(folder.name for folder in cut.iterdir()) == ["step-000003", f"step-{STEPS:06}"]
    assert (cut / "step-000003" / "model.safetensors").exists()
    assert len(list((cut / f"step-{STEPS:06}").glob("model-rank-*"))) == world_size


def test_a_run_can_be_resumed_under_another_strategy_and_on_other_ranks(
    train: Train, alone: list[float], tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    losses = train("fsdp", 2, "--output", cut, "--state-dict-type", "sharded", steps=2)
    losses += train("ddp", 2, "--output", cut, steps=4)
    losses += train("fsdp", 3, "--output", cut)
    assert losses == pytest.approx(alone, abs=1e-5)


def test_a_finished_run_writes_a_sample_and_says_that_there_is_nothing_to_train(train: Train, tmp_path: Path) -> None:
    shown: list[str] = []
    train("fsdp", 2, "--output", tmp_path / "run")
    assert train("fsdp", 2, "--output", tmp_path / "run", shown=shown) == []
    before, _, _ = shown[0].partition("a sample")
    assert f"nothing to train: the run has {STEPS} steps; give more --steps than that" in before


def test_a_run_of_another_model_is_refused_and_stays(train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train("ddp", 1, "--output", run)
    with pytest.raises(RanksFailed, match=rf"the checkpoint {re.escape(str(run))}/step-\d+ does not fit the model"):
        train("ddp", 1, "--output", run, "--depth", "1")
    assert [folder.name for folder in run.iterdir()] == [f"step-{STEPS:06}"]


def test_a_folder_that_can_not_be_is_one_error_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = [*TINY, "--steps", "1", "--output", str(tmp_path / "file" / "run")]

    def work() -> None:
        import train_lm

        train_lm.main(line)

    outcomes = ranks.outcomes(work, process_group=False)
    assert [outcome.status for outcome in outcomes] == ["raised", "raised"]
    assert {outcome.message for outcome in outcomes} == {outcomes[0].message}
    assert outcomes[0].message.endswith("run can't be read: Not a directory")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--data", "nowhere"), "--data nowhere: no such file or folder"),
        (("--batch", "5"), "--batch 5 can't be cut into 1 shares of 2 micro-batches; 6 can"),
        (("--batch", "1"), "--batch 1 can't be cut into 1 shares of 2 micro-batches; 2 can"),
        (("--micro-batches", "0"), "argument --micro-batches: expected a whole number from 1 on, found '0'"),
        (("--save-every", "0"), "argument --save-every: expected a whole number from 1 on, found '0'"),
        (("--learning-rate", "nan"), "argument --learning-rate: expected a finite number above 0, found 'nan'"),
        (("--clip", "0"), "argument --clip: expected a finite number above 0, found '0'"),
        (("--seed", "9" * 20), f"argument --seed: expected a whole number from 0 on, found '{'9' * 20}'"),
        (("--output", __file__), f"--output {__file__}: expected a folder, found a file"),
        (("--strategy", ""), "unknown strategy ''"),
        (("--steps", "-1"), "argument --steps: expected a whole number from 0 on, found '-1'"),
        (("--heads", "3"), "--heads 3 does not divide --width 16"),
        (("--prompt", ""), "--prompt: expected some text to begin with, found none"),
        (("--max-bytes", "16"), "has 16 bytes of text, and a context of 16 needs more"),
        (("--strategy", "fdsp"), "did you mean 'fsdp'?"),
        (("--keep-last", "0"), "argument --keep-last: expected a whole number from 1 on, found '0'"),
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
    with pytest.raises((SystemExit, Exception)) as caught:
        train_lm.main([*TINY, "--steps", "1", *arguments])
    assert message in f"{caught.value}{capsys.readouterr().err}"


@pytest.mark.deep
@needs_proc
def test_an_interrupt_leaves_no_process_behind_and_no_traceback_of_a_rank(tmp_path: Path) -> None:
    with launched("--output", tmp_path / "run") as (process, ranks):
        assert len(ranks) == 2
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does on Ctrl-C
        output, _ = process.communicate(timeout=LIMIT)
        assert process.returncode != 0
        assert_all_end(ranks)
    # torch marks what a rank's uncaught exception prints.
    assert "[rank" not in output


@pytest.mark.parametrize("file", ["train_lm.py", "byte_lm.py", "display.py"])
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
