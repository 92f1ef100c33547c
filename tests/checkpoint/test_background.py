"""A save in the background: what was there when it began, one at a time, and no failure without a word."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import parallel_core
from parallel_core import CheckpointError, DistributedConfig
from parallel_core import ranks as collective
from parallel_core.checkpoint import publishing
from parallel_core.checkpoint.background import finish, group_apart
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import KINDS, Run, differences
from tests.commands import python

CONFIGS = {
    "ddp": DistributedConfig(parallel_strategy="ddp"),
    "fsdp": DistributedConfig(parallel_strategy="fsdp", fsdp_mixed_precision="fp32", fsdp_auto_wrap_min_params=50),
    "fsdp2": DistributedConfig(parallel_strategy="fsdp2", fsdp2_mixed_precision="fp32", fsdp2_auto_wrap_min_params=50),
}


@pytest.mark.parametrize("strategy", CONFIGS)
def test_what_is_saved_is_what_was_there_while_training_goes_on(ranks: Ranks, tmp_path: Path, strategy: str) -> None:
    def work(kind: str) -> list[str]:
        run, never_saved = (Run("language_model", CONFIGS[strategy], seed=1) for _ in range(2))
        expected = []
        for step in range(4):
            parallel_core.save_checkpoint(
                tmp_path / f"{kind}-{step}",
                run.model,
                run.optimizer,
                state_dict_type=kind,
                extra={"step": step},
                background=True,
            )
            # The writing waits for nobody: collectives of training and of the save cross each other here.
            run.train([step])
            never_saved.train([step])
            expected.append(run.full())
        found = differences(run.full(), never_saved.full(), where="after all saves")
        for step in range(1, 4):
            other = Run("language_model", CONFIGS[strategy], seed=2)
            loaded = parallel_core.load_checkpoint(tmp_path / f"{kind}-{step}", other.model, other.optimizer)
            assert loaded.extra == {"step": step}
            found += differences(other.full(), expected[step - 1], where=f"step {step}")
        return found

    for kind in KINDS:
        assert ranks(work, kind) == [[], []]


def test_a_second_save_waits_for_the_first_and_a_handle_tells_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, began = threading.Event(), threading.Event()

    def held_up(job: Any) -> None:
        began.set()
        assert gate.wait(30)
        publishing.write(job)

    monkeypatch.setattr("parallel_core.checkpoint.saving.write", held_up)
    model = nn.Linear(2, 2)
    first = parallel_core.save_checkpoint(tmp_path / "a", model, background=True)
    assert began.wait(30)
    assert not first.done
    assert parallel_core.latest_checkpoint(tmp_path) is None
    threading.Timer(0.2, gate.set).start()
    second = parallel_core.save_checkpoint(tmp_path / "b", model)
    assert [first.done, second.done] == [True, True]
    assert (first.wait(), second.wait()) == (tmp_path / "a", tmp_path / "b")
    assert parallel_core.latest_checkpoint(tmp_path) == tmp_path / "b"


def test_a_wait_that_is_interrupted_leaves_the_save_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def held_up(job: Any) -> None:
        assert gate.wait(30)
        publishing.write(job)

    def saved(step: int, *, background: bool) -> parallel_core.CheckpointSave:
        return parallel_core.save_checkpoint(tmp_path / "a", model, extra=step, background=background)

    model = nn.Linear(2, 2)
    with monkeypatch.context() as patch:
        patch.setattr("parallel_core.checkpoint.saving.write", held_up)
        first = saved(1, background=True)

    def interrupted(call: Callable[[], object]) -> None:
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        call()

    for call in (first.wait, lambda: saved(2, background=False), finish):
        with pytest.raises(KeyboardInterrupt):
            interrupted(call)
        assert not first.done
    threading.Timer(0.1, gate.set).start()
    assert saved(2, background=False).done
    assert first.done
    assert parallel_core.load_checkpoint(tmp_path / "a", model).extra == 2
    assert first.wait() == tmp_path / "a"


def test_a_process_group_that_is_ended_too_early_is_told(ranks: Ranks, tmp_path: Path) -> None:
    def work(kind: str) -> tuple[str, float]:
        gate = threading.Event()
        write = publishing.write

        def held_up(job: Any) -> None:
            assert gate.wait(30)
            write(job)

        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(tmp_path / f"store-{kind}"), 2),  # type: ignore[attr-defined]  # not in its __all__
            rank=int(os.environ["RANK"]),
            world_size=2,
            timeout=timedelta(seconds=23),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("parallel_core.checkpoint.saving.write", held_up)
            save = parallel_core.save_checkpoint(tmp_path / "a", nn.Linear(2, 2), state_dict_type=kind, background=True)
        apart = group_apart()
        assert apart is not None
        patience = apart._get_backend(torch.device("cpu")).options._timeout
        logging.disable()
        dist.destroy_process_group()
        gate.set()
        with pytest.raises(CheckpointError) as caught:
            save.wait()
        logging.disable(logging.NOTSET)
        return str(caught.value), patience.total_seconds()

    told = (
        "the process group was ended while a save in the background needed it; wait for the save before, or let the "
        "group be ended by parallel_core.process_group, which does"
    )
    for kind in KINDS:
        # The group for the save waits as long for a rank as the default one.
        assert ranks(work, kind, process_group=False) == [(told, 23.0)] * 2
    assert not (tmp_path / "a").exists()


def test_a_failure_is_the_same_on_all_ranks_and_is_raised_where_nobody_waits(
    ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> list[str]:
        logging.disable()  # it is told in the log too: see below
        run = Run("blocks", CONFIGS["fsdp2"])
        place, other = tmp_path / "file", tmp_path / "other"
        if collective.rank() == 0:
            place.touch()
        collective.all_gather(None)
        found = []

        def caught(function: Any, *args: Any, **options: Any) -> None:
            try:
                function(*args, **options)
            except CheckpointError as error:
                found.append(str(error).replace(str(tmp_path), ""))
            else:
                found.append("none")

        save = parallel_core.save_checkpoint(place, run.model, background=True)
        caught(save.wait)
        caught(parallel_core.save_checkpoint, other, run.model)  # it has been told
        parallel_core.save_checkpoint(place, run.model, background=True)
        caught(parallel_core.save_checkpoint, other, run.model)
        save = parallel_core.save_checkpoint(place, run.model, background=True)
        if collective.rank() == 1:
            caught(save.wait)
            found.pop()
        caught(parallel_core.load_checkpoint, other, run.model)
        caught(parallel_core.load_checkpoint, other, run.model)
        logging.disable(logging.NOTSET)
        return found

    first, second = ranks(work)
    assert first == second
    told = "rank 0 of 2: /file is there and is no folder; choose another name"
    unseen = f"the checkpoint /file was not saved, in the background: {told}"
    assert first == [told, "none", unseen, f"rank 0 of 2: {unseen}", "none"]
    (tmp_path / "file").touch()
    parallel_core.save_checkpoint(tmp_path / "file", nn.Linear(2, 2), background=True)
    with pytest.raises(CheckpointError, match="was not saved, in the background"):
        parallel_core.load_checkpoint(tmp_path / "other", nn.Linear(2, 2))
    reason = f"{tmp_path / 'file'} is there and is no folder; choose another name"
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [f"the checkpoint {tmp_path / 'file'} could not be saved: {reason}"]


def test_a_rank_that_can_t_copy_is_told_of_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    def work() -> str:
        def failing(job: Any) -> Any:
            if collective.rank() == 1:
                raise MemoryError("no room")
            return job

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("parallel_core.checkpoint.saving.copied_job", failing)
            with pytest.raises(CheckpointError) as caught:
                parallel_core.save_checkpoint(tmp_path / "a", nn.Linear(2, 2), background=True)
        return str(caught.value)

    assert ranks(work) == ["rank 1 of 2: MemoryError: no room"] * 2
    assert list(tmp_path.iterdir()) == []


def test_the_process_group_does_not_end_before_the_write_does(ranks: Ranks, tmp_path: Path) -> None:
    def work() -> Path | None:
        def late(job: Any) -> None:
            time.sleep(0.4)
            publishing.write(job)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("parallel_core.checkpoint.saving.write", late)
            with parallel_core.process_group(DistributedConfig(backend="gloo")):
                wrapped = parallel_core.wrap_model_for_training(nn.Linear(2, 2), DistributedConfig())
                assert wrapped is not None
                parallel_core.save_checkpoint(tmp_path / "a", wrapped, state_dict_type="full", background=True)
        return parallel_core.latest_checkpoint(tmp_path)

    assert ranks(work, process_group=False) == [tmp_path / "a"] * 2


SCRIPT = """
import signal, sys, time
import torch
from parallel_core.checkpoint import publishing
from parallel_core import save_checkpoint

write_manifest = publishing.write_manifest
publishing.write_manifest = lambda *args: (time.sleep(0.4), write_manifest(*args))
save = save_checkpoint(sys.argv[1] + "/alone", torch.nn.Linear(2, 2), background=True)
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 0.1)  # as if somebody pressed Ctrl-C
try:
    save.wait()
except KeyboardInterrupt:
    print("interrupted")
"""


def test_the_process_does_not_end_before_the_write_does(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    assert "interrupted" in python("script.py", tmp_path, cwd=tmp_path)
    parallel_core.load_checkpoint(tmp_path / "alone", nn.Linear(2, 2))
