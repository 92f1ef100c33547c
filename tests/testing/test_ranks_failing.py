"""What a call tells when ranks fail, and that the next call works after it."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.distributed as dist

from parallel_core.testing import Outcome, Ranks, RanksFailed, pool, template_process


class OnlyHereError(ValueError):
    """An exception that no module but this one has."""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_error_shows_every_ranks_traceback_cause_and_output(ranks: Ranks) -> None:
    def work() -> str:
        print(f"rank {dist.get_rank()} was here")
        if dist.get_rank() == 1:
            try:
                [][3]
            except IndexError as error:
                raise OnlyHereError("first line\nsecond line") from error
        return "fine"

    with pytest.raises(RanksFailed) as caught:
        ranks(work, world_size=3)
    report = str(caught.value)
    headline = f"{work.__qualname__} failed on rank 1 of 3"
    assert report.startswith(
        f"{headline}\n  rank 0 returned 'fine'\n  rank 1 raised {__name__}.OnlyHereError: first line ...\n"
        "  rank 2 returned 'fine'\n"
    )
    assert "IndexError: list index out of range" in report
    assert 'raise OnlyHereError("first line\\nsecond line") from error' in report
    assert "second line" in report
    assert "rank 1 was here" in report
    assert [outcome.ok for outcome in caught.value.outcomes] == [True, False, True]
    assert isinstance(caught.value, AssertionError)


def test_a_failed_assertion_shows_its_values(ranks: Ranks) -> None:
    def work() -> None:
        assert dist.get_rank() == 7

    with pytest.raises(RanksFailed, match="rank 1 raised AssertionError: assert 1 == 7"):
        ranks(work)


def test_outcomes_of_errors_on_all_ranks_keep_the_workers(ranks: Ranks) -> None:
    def work() -> None:
        dist.all_reduce(torch.ones(1))
        raise OnlyHereError(f"no strategy {dist.get_rank()}")

    workers = ranks(os.getpid)
    outcomes = ranks.outcomes(work)
    assert [outcome.status for outcome in outcomes] == ["raised", "raised"]
    assert [outcome.message for outcome in outcomes] == ["no strategy 0", "no strategy 1"]
    assert {outcome.error_type for outcome in outcomes} == {f"{__name__}.OnlyHereError"}
    assert all(type(outcome.exception) is OnlyHereError for outcome in outcomes)
    assert ranks(os.getpid) == workers


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("stop")], ids=lambda error: type(error).__name__)
def test_what_would_end_a_process_is_an_outcome(ranks: Ranks, error: BaseException) -> None:
    def work() -> None:
        raise error

    outcomes = ranks.outcomes(work)
    assert {(outcome.status, outcome.error_type) for outcome in outcomes} == {("raised", type(error).__name__)}


def test_an_exception_that_cannot_be_pickled_comes_back_as_text(ranks: Ranks) -> None:
    class AwkwardError(Exception):
        def __init__(self, *, reason: str) -> None:
            super().__init__(reason)

    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def work() -> None:
        raise AwkwardError(reason="can't be rebuilt") if dist.get_rank() == 0 else MuteError

    awkward, mute = ranks.outcomes(work)
    assert awkward.exception is None
    assert awkward.message == "can't be rebuilt"
    assert awkward.error_type.endswith("AwkwardError")
    assert mute.message == "(its message could not be had: RuntimeError('no text'))"


def test_a_rank_that_hangs_is_stopped_and_its_place_told(ranks: Ranks) -> None:
    def work() -> None:
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))  # rank 0 hangs here
        print("going to sleep")
        time.sleep(60)  # rank 1 hangs here

    source = Path(__file__).read_text().splitlines()
    zero, one = (i for i, line in enumerate(source, 1) if re.search(r"# rank \d hangs here$", line))
    workers = ranks(os.getpid)
    start = time.monotonic()
    with pytest.raises(RanksFailed) as caught:
        ranks(work, timeout=1)
    assert time.monotonic() - start < 20
    waiting, sleeping = caught.value.outcomes
    assert (waiting.status, sleeping.status) == ("hung", "hung")
    inside = r"\(inside all_reduce, distributed_c10d.py:\d+\)"
    place = rf"at {re.escape(__file__)}:{zero} in work {inside}, 1 s after the start"
    assert re.fullmatch(place, waiting.message)
    assert sleeping.message == f"at {__file__}:{one} in work, 1 s after the start"
    assert f'File "{__file__}", line {zero} in work' in waiting.traceback
    assert "die_with_the_pool" not in waiting.traceback
    assert sleeping.output == "going to sleep\n"
    assert f"rank 1 hung {sleeping.message}" in str(caught.value)
    assert not any(map(is_running, workers))


def test_ranks_that_wait_for_one_that_failed_are_stopped_soon(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "GRACE", 0.5)

    def work() -> None:
        if dist.get_rank() == 1:
            raise ValueError("only I")
        dist.barrier()

    ranks(os.getpid)
    start = time.monotonic()
    waiting, failed = ranks.outcomes(work, timeout=60)
    assert time.monotonic() - start < 20
    assert (waiting.status, failed.status) == ("hung", "raised")
    assert waiting.message.endswith("0.5 s after rank 1 had failed")


def test_a_rank_that_dies_is_told_with_its_exit(ranks: Ranks) -> None:
    def work() -> None:
        if dist.get_rank() == 1:
            ctypes.string_at(0)  # a segmentation fault
        print("last words")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # later Pythons warn of a fork where there are threads
            child = os.fork()  # it has the dead rank's channel to the pool open, as a data loader's process would
        if child == 0:
            time.sleep(60)
        os._exit(3)

    start = time.monotonic()
    exited, crashed = ranks.outcomes(work)
    assert time.monotonic() - start < 20
    assert exited.headline() == "died: the process ended with exit code 3"
    assert exited.output == "last words\n"
    place = rf"{re.escape(__file__)}:\d+ in work \(inside string_at, __init__.py:\d+\)"
    assert re.fullmatch(rf"died: the process was ended by SIGSEGV at {place}", crashed.headline())
    assert "Segmentation fault" in crashed.traceback


def test_a_rank_that_dies_after_its_answer_is_told(ranks: Ranks) -> None:
    class Bomb:
        def __init__(self) -> None:
            self.cycle = self  # so that it lives until the collection at the end of the call

        def __del__(self) -> None:
            os.kill(os.getpid(), 40)

    def work() -> str:
        Bomb()
        return "fine"

    expected = "left behind: a process that did not survive the end of the call: the process was ended by signal 40"
    with pytest.raises(RanksFailed, match=expected):
        ranks(work, world_size=1)


def test_a_rank_that_cannot_tell_where_it_hangs_is_stopped_too(ranks: Ranks) -> None:
    def work() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    [outcome] = ranks.outcomes(work, world_size=1, process_group=False, timeout=1)
    assert outcome.headline() == "hung at an unknown place: the process did not answer, 1 s after the start"


def test_workers_that_do_not_start_are_told_with_their_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_BOOT", "raise SystemExit('no room for torch')")
    message = (
        r"^a worker process for the ranks did not start: the process ended with exit code 1; it wrote:\nno room for"
    )
    with Ranks() as broken, pytest.raises(RuntimeError, match=message):
        broken(os.getpid)


def test_a_worker_that_died_between_calls_is_replaced(ranks: Ranks) -> None:
    first, second = ranks(os.getpid)
    os.kill(second, signal.SIGKILL)
    while Path(f"/proc/{second}").exists():  # until its parent has seen it end
        time.sleep(0.01)
    again = ranks(os.getpid)
    assert again[0] == first
    assert again[1] != second


def test_workers_whose_template_died_are_replaced(ranks: Ranks) -> None:
    before, (template, _) = ranks(os.getpid), ranks(os.getppid)
    os.kill(template, signal.SIGKILL)
    while is_running(template):
        time.sleep(0.01)
    after = ranks(os.getpid)
    assert after[0] != before[0]
    assert after[1] == before[1]
    assert not is_running(before[0])


def test_where_nothing_can_be_forked_a_worker_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "_FORKS", False)

    def work() -> None:
        print("last words")
        os._exit(3)

    with Ranks() as fresh:
        [outcome] = fresh.outcomes(work, world_size=1)
    assert outcome.headline() == "died: the process ended with exit code 3"
    assert outcome.output == "last words\n"


def test_what_a_function_leaves_behind_fails_the_call(ranks: Ranks) -> None:
    def work() -> int:
        if os.environ["RANK"] == "0":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]  # not in __all__
            return subprocess.Popen(["sleep", "60"]).pid
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        threading.Thread(target=time.sleep, args=(60,), name="lingering").start()
        raise ValueError("an error hides nothing")

    with pytest.raises(RanksFailed) as caught:
        ranks.outcomes(work, process_group=False)
    returned, raised = caught.value.outcomes
    child = f"the child process {returned.value} (sleep 60)"
    assert returned.leftovers == (
        "an initialised process group (torch.distributed.destroy_process_group() ends it)",
        child,
    )
    assert raised.leftovers == (
        "the default dtype changed from torch.float32 to torch.float64",
        "grad mode changed from True to False",
        "the thread 'lingering'",
    )
    report = str(caught.value)
    assert "rank 0 left behind: an initialised process group" in report
    assert f"; {child}\n" in report
    assert "rank 1 raised ValueError: an error hides nothing; left behind: the default dtype changed" in report
    assert not is_running(returned.value)
    # The workers that were left so are gone: the next call finds all as it should be.
    assert ranks(lambda: (dist.get_world_size(), torch.get_default_dtype())) == [(2, torch.float32)] * 2


def test_a_collective_that_is_still_pending_fails_the_call(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_SETTLE_LIMIT", 1.0)

    def work(fail: bool) -> None:
        value = torch.ones(1_000_000)
        if dist.get_rank() == 0:
            dist.all_reduce(value, async_op=True)
        else:
            dist.broadcast(value, 0, async_op=True)
        if fail:
            raise ValueError("given up")

    with pytest.raises(RanksFailed, match="left behind: a collective that is still pending"):
        ranks(work, False)
    # After an error on every rank that is no wonder, and the error is what counts.
    outcomes = ranks.outcomes(work, True)
    assert [outcome.headline() for outcome in outcomes] == ["raised ValueError: given up"] * 2
    assert ranks(dist.get_rank) == [0, 1]


def test_an_interrupted_call_leaves_no_rank_running(ranks: Ranks) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    workers = ranks(os.getpid, world_size=1)
    old = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            ranks(time.sleep, 60, world_size=1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert not any(map(is_running, workers))
    assert ranks(dist.get_rank, world_size=1) == [0]


def test_what_ranks_have_in_common_is_told_once() -> None:
    def raised(rank: int, line: int) -> Outcome:
        trace = f"Traceback (most recent call last):\n  line {line}\nValueError: no\n"
        return Outcome(rank=rank, status="raised", error_type="ValueError", message="no", traceback=trace)

    report = str(RanksFailed("work", [raised(0, 1), raised(1, 2), raised(2, 1)]))
    assert report == (
        "work failed on ranks 0, 1, 2 of 3\n"
        "  rank 0 raised ValueError: no\n"
        "  rank 1 raised ValueError: no\n"
        "  rank 2 raised ValueError: no\n"
        "\n"
        "ranks 0, 2:\n"
        "  Traceback (most recent call last):\n"
        "    line 1\n"
        "  ValueError: no\n"
        "\n"
        "rank 1:\n"
        "  Traceback (most recent call last):\n"
        "    line 2\n"
        "  ValueError: no"
    )


def test_only_the_end_of_long_output_is_told() -> None:
    outcome = Outcome(rank=0, status="died", message="gone", output="x" * 10_000 + "\nthe end\n")
    details = outcome.details()
    assert details.startswith("output (its end):\n  xxx")
    assert details.endswith("xxx\n  the end")
    assert len(details) < 5000
