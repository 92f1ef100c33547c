"""The process group: joined for the length of a block, and ended with it if it was made there."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallel_core
from parallel_core import ProcessGroupError, process_group
from parallel_core.distributed import LAUNCHER_VARIABLES
from parallel_core.testing import Ranks

pytestmark = pytest.mark.usefixtures("no_launcher")

CPU = torch.device("cpu")


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def config_of(**settings: Any) -> parallel_core.DistributedConfig:
    return parallel_core.DistributedConfig(**{"backend": "gloo", "timeout_seconds": 30.0, **settings})


def launched(**changes: str | None) -> dict[str, str]:
    """Return a launcher's variables for one rank; those that are None are taken out."""
    complete: Mapping[str, str | None] = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        **changes,
    }
    return {name: value for name, value in complete.items() if value is not None}


def refusal(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, **settings: Any) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ProcessGroupError) as caught, process_group(config_of(**settings)):
        pytest.fail("the block must not be entered")
    assert not dist.is_initialized()
    return str(caught.value)


def test_with_no_launcher_this_is_a_world_of_one_with_no_group() -> None:
    with process_group(config_of()) as group:
        assert (group.rank, group.local_rank, group.world_size, group.device) == (0, 0, 1, CPU)
        assert not dist.is_initialized()
    assert not dist.is_initialized()


@pytest.mark.parametrize(("passed", "kind"), [("nccl", "str"), (None, "NoneType"), ({"backend": "gloo"}, "dict")])
def test_what_is_no_config_is_refused(passed: Any, kind: str) -> None:
    with pytest.raises(ProcessGroupError) as caught, process_group(passed):
        pytest.fail("the block must not be entered")
    assert str(caught.value) == f"expected a DistributedConfig, found {kind}; load_config makes one"


def test_an_address_left_over_in_a_shell_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with process_group(config_of()) as group:
        assert group.world_size == 1
        assert not dist.is_initialized()


def test_the_ranks_of_a_launcher_are_joined_and_left(ranks: Ranks) -> None:
    def work() -> tuple[Any, ...]:
        with process_group(config_of()) as group:
            total = torch.tensor(group.rank + 1)
            dist.all_reduce(total)
            inside = (dist.is_initialized(), dist.get_backend(), int(total))
        return group.rank, group.local_rank, group.world_size, group.device, inside, dist.is_initialized()

    expected = [(rank, rank, 3, CPU, (True, "gloo", 6), False) for rank in range(3)]
    assert ranks(work, process_group=False, world_size=3) == expected


def test_a_launchers_world_of_one_has_a_group(ranks: Ranks) -> None:
    def work() -> tuple[int, bool]:
        with process_group(config_of()) as group:
            return group.world_size, dist.is_initialized()

    assert ranks(work, process_group=False, world_size=1) == [(1, True)]


def test_a_group_can_be_made_again_after_it_was_left(ranks: Ranks) -> None:
    def work() -> list[int]:
        totals = []
        for _ in range(2):
            with process_group(config_of()):
                total = torch.tensor(1)
                dist.all_reduce(total)
                totals.append(int(total))
        return totals

    assert ranks(work, process_group=False) == [[2, 2]] * 2


def test_the_group_is_left_when_the_block_fails_and_the_error_is_the_blocks_own(ranks: Ranks) -> None:
    def work() -> tuple[str, bool]:
        try:
            with process_group(config_of()):
                raise ValueError("in the block")
        except ValueError as error:
            return str(error), dist.is_initialized()

    assert ranks(work, process_group=False) == [("in the block", False)] * 2


def test_no_rank_is_in_the_block_before_all_have_joined(ranks: Ranks, tmp_path: Path) -> None:
    """A rank that failed there would break the connections that the others are making."""

    def work() -> bool:
        def slow(*args: Any, **kwargs: Any) -> None:
            join(*args, **kwargs)
            if os.environ["RANK"] == "1":
                time.sleep(0.5)
                (tmp_path / "joined").touch()

        join = dist.init_process_group
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "init_process_group", slow)
            with process_group(config_of()):
                return (tmp_path / "joined").exists()

    assert ranks(work, process_group=False) == [True, True]


def test_a_rank_that_has_joined_leaves_no_group_where_another_has_not(ranks: Ranks) -> None:
    def work() -> tuple[str, bool]:
        def wait(*_: object) -> None:
            raise dist.DistStoreError("wait timeout")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist.PrefixStore, "wait", wait)  # type: ignore[attr-defined]  # not in its __all__
            with pytest.raises(ProcessGroupError) as caught, process_group(config_of()):
                pass
        return str(caught.value), dist.is_initialized()

    for rank, (message, is_initialized) in enumerate(ranks(work, process_group=False)):
        assert f"rank {rank} could not join 2 ranks at " in message
        assert "DistStoreError: wait timeout; check that every rank was started" in message
        assert not is_initialized


def test_a_group_that_is_there_already_is_used_and_not_destroyed(ranks: Ranks) -> None:
    def work() -> tuple[int, int, bool]:
        with process_group(config_of()) as group:
            pass
        return group.rank, group.world_size, dist.is_initialized()

    assert ranks(work, world_size=2) == [(0, 2, True), (1, 2, True)]


def test_a_group_inside_another_is_the_outer_one(ranks: Ranks) -> None:
    def work() -> list[bool]:
        with process_group(config_of()):
            with process_group(config_of()) as inner:
                alive = [inner.world_size == 2]
            alive.append(dist.is_initialized())
        return [*alive, dist.is_initialized()]

    assert ranks(work, process_group=False) == [[True, True, False]] * 2


def test_a_group_that_the_block_destroyed_itself_is_no_error(ranks: Ranks) -> None:
    def work() -> bool:
        with process_group(config_of()):
            dist.destroy_process_group()
        return dist.is_initialized()

    assert ranks(work, process_group=False) == [False, False]


def test_the_timeout_is_the_groups(ranks: Ranks) -> None:
    """A rank that never comes holds the others up for as long, and no longer."""

    def work() -> tuple[str, float]:
        with process_group(config_of(timeout_seconds=2.0)) as group:
            start = time.monotonic()
            if group.rank == 1:
                time.sleep(4)
                return "", 0.0
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError as error:
                return type(error).__name__, time.monotonic() - start
        return "", 0.0

    kind, seconds = ranks(work, process_group=False)[0]
    assert kind
    assert 1.5 < seconds < 3.9


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"MASTER_PORT": None},
            (
                "the environment has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and lacks MASTER_PORT; start the script "
                "with torchrun, or set all of them"
            ),
        ),
        (
            {"WORLD_SIZE": None, "LOCAL_RANK": None, "MASTER_ADDR": None, "MASTER_PORT": None},
            (
                "the environment has RANK and lacks WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; start the script "
                "with torchrun, or set all of them"
            ),
        ),
        ({"RANK": "first"}, "RANK is 'first', expected a whole number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is '', expected a whole number"),
        ({"LOCAL_RANK": "0.0"}, "LOCAL_RANK is '0.0', expected a whole number"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT is 'http', expected a whole number"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT is 65536, expected 0 to 65535"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK is -1, expected 0 or more"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2, expected 0 to 1"),
        ({"RANK": "-1"}, "RANK is -1, expected 0 to 0"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE is 0, expected 1 or more"),
    ],
)
def test_a_launchers_variables_that_are_incomplete_or_wrong_are_refused(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], text: str
) -> None:
    assert refusal(launched(**changes), monkeypatch) == text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here, so nccl is right")
def test_nccl_without_a_cuda_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "backend is 'nccl', and no CUDA device is there; allowed here are 'auto' and 'gloo'"
    assert refusal({}, monkeypatch, backend="nccl") == text
    assert refusal(launched(), monkeypatch, backend="nccl") == text


def test_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert refusal(launched(LOCAL_RANK="2"), monkeypatch, backend="auto") == (
        "LOCAL_RANK is 2 and this machine has 2 cuda devices; start at most 2 ranks here, or set backend to 'gloo' to "
        "train on the CPU"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_a_master_that_cannot_be_reached_is_told_with_host_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    start = time.monotonic()
    text = refusal(launched(RANK="1", WORLD_SIZE="2", MASTER_PORT=str(port)), monkeypatch, timeout_seconds=1.0)
    assert time.monotonic() - start < 10
    assert text.startswith(f"rank 1 could not join 2 ranks at 127.0.0.1:{port} within 1.0 s: ")
    assert text.endswith("; check that every rank was started and that the port is free")
    assert "\n" not in text


def test_ranks_that_do_not_come_are_told_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    text = refusal(launched(WORLD_SIZE="2", MASTER_PORT=str(port)), monkeypatch, timeout_seconds=1.0)
    assert text.startswith(f"rank 0 could not join 2 ranks at 127.0.0.1:{port} within 1.0 s: ")


def test_a_port_that_is_taken_is_told_with_host_and_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = refusal(launched(WORLD_SIZE="2", MASTER_PORT=str(port)), monkeypatch, timeout_seconds=1.0)
    assert text.startswith(f"rank 0 could not join 2 ranks at 127.0.0.1:{port} within 1.0 s: ")


def test_a_group_can_be_joined_after_one_that_could_not(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal(launched(RANK="1", WORLD_SIZE="2", MASTER_PORT=str(free_port())), monkeypatch, timeout_seconds=1.0)
    for name, value in launched(MASTER_PORT=str(free_port())).items():
        monkeypatch.setenv(name, value)
    with process_group(config_of()) as group:
        assert (group.rank, group.world_size) == (0, 1)
        assert dist.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and there is none")
def test_on_cuda_a_launchers_rank_gets_its_device_and_both_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, setting in launched(MASTER_PORT=str(free_port())).items():
        monkeypatch.setenv(name, setting)
    with process_group(config_of(backend="auto")) as group:
        assert group.device == torch.device("cuda", 0)
        assert torch.cuda.current_device() == 0
        for device in ("cpu", "cuda"):
            value = torch.ones(1, device=device)
            dist.all_reduce(value)
            assert value.item() == 1.0
    assert not dist.is_initialized()
