"""What holds on a rank, and how functions, arguments and results get there and back."""

from __future__ import annotations

import os
import random
import sys
import warnings
from dataclasses import dataclass
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_core.testing import Outcome, Ranks, pytest_plugin, template_process
from parallel_core.testing.pool import Pool
from parallel_core.testing.task import Task

FACTOR = 10


@dataclass
class Point:
    x: int

    def moved(self, by: int) -> Point:
        return Point(self.x + by)


def rank_times_factor() -> int:
    return dist.get_rank() * FACTOR


def sum_of_ranks() -> int:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return int(total)


def test_results_come_back_by_rank(ranks: Ranks) -> None:
    def work(factor: int, *, offset: int) -> int:
        return dist.get_rank() * factor + offset

    assert ranks(work, 10, offset=1, world_size=3) == [1, 11, 21]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_call_has_a_process_group_over_just_its_ranks(ranks: Ranks, world_size: int) -> None:
    def work() -> tuple[int, int, str]:
        return sum_of_ranks(), dist.get_world_size(), dist.get_backend()

    assert ranks(work, world_size=world_size) == [(sum(range(world_size)), world_size, "gloo")] * world_size


def test_workers_are_reused_from_call_to_call(ranks: Ranks) -> None:
    three = ranks(os.getpid, world_size=3)
    assert ranks(os.getpid, world_size=2) == three[:2]
    assert ranks(os.getpid, world_size=3, process_group=False) == three
    assert len({*three, os.getpid()}) == 4


def test_ranks_beside_each_other_hash_differently(ranks: Ranks) -> None:
    # So they walk a set in different orders, as the ranks of a real run do, and what relies on its order shows.
    first, second, third = ranks(lambda: hash("a name"), world_size=3)
    assert first != second != third


@pytest.mark.parametrize(("seed", "templates"), [(None, 2), ("random", 2), ("", 2), ("1", 1)])
def test_one_template_serves_all_ranks_where_they_are_to_hash_alike(
    monkeypatch: pytest.MonkeyPatch, seed: str | None, templates: int
) -> None:
    class Made:
        count = 0

        def __init__(self) -> None:
            Made.count += 1

        def code(self) -> None: ...

    monkeypatch.setattr(template_process, "_Template", Made)
    monkeypatch.setattr(template_process, "Child", lambda template, descriptors: None)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    made_by = template_process.Templates()
    for rank in range(4):
        made_by.make_worker(rank)
    assert Made.count == templates


def test_functions_of_every_kind_can_be_sent(ranks: Ranks) -> None:
    def with_offset(offset: int, rank: int) -> int:
        return rank + offset

    assert ranks(rank_times_factor) == [0, 10]
    assert ranks(lambda: rank_times_factor() + FACTOR) == [10, 20]
    assert ranks(partial(with_offset, 5), 1) == [6, 6]
    assert ranks(Point(1).moved, 2) == [Point(3), Point(3)]
    assert ranks(dist.get_rank) == [0, 1]


def test_functions_of_a_module_that_only_this_process_could_load_can_be_sent(ranks: Ranks, tmp_path: Path) -> None:
    path = tmp_path / "loaded_from_a_file.py"
    path.write_text("OFFSET = 2\ndef shifted(rank):\n    return rank + OFFSET\n")
    spec = spec_from_file_location("loaded_from_a_file", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["loaded_from_a_file"] = module
    try:
        spec.loader.exec_module(module)
        assert ranks(module.shifted, 1) == [3, 3]
    finally:
        del sys.modules["loaded_from_a_file"]


def test_classes_of_the_test_module_keep_their_identity(ranks: Ranks) -> None:
    def work(point: Point) -> Point:
        assert isinstance(point, Point)
        return point.moved(dist.get_rank())

    results = ranks(work, Point(1))
    assert results == [Point(1), Point(2)]
    assert all(type(result) is Point for result in results)


def test_what_a_function_changes_in_its_arguments_stays_on_the_rank(ranks: Ranks) -> None:
    items = [1]

    def work() -> list[int]:
        items.append(dist.get_rank())
        return items

    assert ranks(work) == [[1, 0], [1, 1]]
    assert items == [1]


def test_tensors_come_back_whole_and_without_their_graph(ranks: Ranks) -> None:
    def work() -> dict[str, Tensor]:
        weight = nn.Parameter(torch.full((2,), float(dist.get_rank())))
        return {
            "weight": weight,
            "loss": (weight * 2).sum(),
            "half": torch.tensor([1.5], dtype=torch.bfloat16),
            "large": torch.arange(2_000_000),
        }

    for rank, result in enumerate(ranks(work)):
        assert isinstance(result["weight"], nn.Parameter)
        assert torch.equal(result["weight"], torch.full((2,), float(rank)))
        assert result["loss"].item() == 4 * rank
        assert not result["loss"].requires_grad
        assert result["half"].dtype == torch.bfloat16
        assert torch.equal(result["large"], torch.arange(2_000_000))
        assert not result["large"].is_shared()


def test_a_function_that_cannot_be_sent_is_refused(ranks: Ranks) -> None:
    generator = (item for item in range(3))
    with pytest.raises(TypeError, match=r"<lambda> can't be sent to the ranks: .*generator.*; make such objects"):
        ranks(lambda: next(generator))


def test_a_result_that_cannot_be_sent_back_is_that_ranks_error(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(lambda: (item for item in range(3)))
    assert {outcome.error_type for outcome in outcomes} == {"TypeError"}
    assert outcomes[1].message.startswith("the result of type generator can't be sent back from the rank")


def test_a_result_that_cannot_be_read_here_is_that_ranks_error(ranks: Ranks) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.stat, ("/no/such/file",)

    [outcome] = ranks.outcomes(Trap, world_size=1)
    assert (outcome.status, outcome.error_type) == ("raised", "FileNotFoundError")
    assert outcome.message.startswith("the result can't be unpickled in the test's process")


def test_random_numbers_are_the_same_on_every_rank_in_every_call(ranks: Ranks) -> None:
    def work() -> tuple[float, float, float]:
        import numpy as np

        return torch.rand(()).item(), random.random(), float(np.random.rand())

    first, second = ranks(work), ranks(work)
    assert first[0] == first[1] == second[0] == second[1]


def test_torch_computes_on_one_thread(ranks: Ranks) -> None:
    assert ranks(lambda: (torch.get_num_threads(), os.environ["OMP_NUM_THREADS"])) == [(1, "1")] * 2


def test_the_environment_is_that_of_the_test(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["FROM_THE_TEST", "FROM_THE_CALL", "REMOVED", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]

    def work() -> list[str | None]:
        return [os.environ.get(name) for name in names]

    monkeypatch.setenv("FROM_THE_TEST", "a")
    monkeypatch.setenv("REMOVED", "b")
    results = ranks(work, env={"FROM_THE_CALL": "c", "REMOVED": None})
    assert results == [["a", "c", None, "0", "0", "2", "2"], ["a", "c", None, "1", "1", "2", "2"]]
    monkeypatch.delenv("FROM_THE_TEST")
    assert ranks(work)[0][:3] == [None, None, "b"]


def test_what_a_function_changes_around_it_is_undone(ranks: Ranks, tmp_path: Path) -> None:
    def change() -> None:
        os.environ["LEFT"] = "1"
        del os.environ["RANK"]
        os.chdir(tmp_path)
        sys.path.append("/nowhere")
        warnings.simplefilter("ignore")

    def look() -> tuple[bool, bool, Path, bool, int]:
        left, kept = "LEFT" in os.environ, "RANK" in os.environ
        return left, kept, Path.cwd(), "/nowhere" in sys.path, len(warnings.filters)

    before = ranks(look)
    ranks(change)
    assert ranks(look) == before
    assert before[0][:4] == (False, True, Path.cwd(), False)


def test_working_directory_and_import_path_are_those_of_the_test(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "made_by_the_test.py").write_text("ANSWER = 42\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def work() -> tuple[str, int]:
        import made_by_the_test  # type: ignore[import-not-found]  # made when it runs

        return str(Path.cwd()), made_by_the_test.ANSWER

    assert ranks(work) == [(str(tmp_path), 42)] * 2


def test_warnings_are_errors_where_the_test_has_them_so(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(lambda: warnings.warn("mind the gap", UserWarning, stacklevel=1))
    assert [(outcome.error_type, outcome.message) for outcome in outcomes] == [("UserWarning", "mind the gap")] * 2


@pytest.mark.filterwarnings("ignore:mind the gap:UserWarning")
def test_a_filter_for_warnings_on_the_test_reaches_the_ranks(ranks: Ranks) -> None:
    ranks(lambda: warnings.warn("mind the gap", UserWarning, stacklevel=1))
    outcomes = ranks.outcomes(lambda: warnings.warn("mind the step", UserWarning, stacklevel=1))
    assert [outcome.message for outcome in outcomes] == ["mind the step"] * 2


def test_a_filter_for_warnings_set_in_the_test_reaches_the_ranks(ranks: Ranks) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="mind the gap")
        ranks(lambda: warnings.warn("mind the gap", UserWarning, stacklevel=1))


def test_output_of_the_ranks_is_the_tests_output(ranks: Ranks, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        rank = dist.get_rank()
        print(f"printed by {rank}")
        os.system(f"echo by a child of {rank} >&2")

    ranks(work)
    written = capfd.readouterr().out
    assert written == "".join(
        f"-- output of rank {rank} --\nprinted by {rank}\nby a child of {rank}\n" for rank in range(2)
    )
    assert [outcome.output for outcome in ranks.outcomes(lambda: print("once"))] == ["once\n"] * 2


def test_without_a_process_group_torchruns_environment_works(ranks: Ranks) -> None:
    def work() -> tuple[bool, int, int]:
        initialized = dist.is_initialized()
        dist.init_process_group("gloo")
        try:
            return initialized, sum_of_ranks(), dist.get_world_size()
        finally:
            dist.destroy_process_group()

    for _ in range(2):  # the second call must not meet what the first left at a port
        assert ranks(work, process_group=False, world_size=3) == [(False, 3, 3)] * 3
    assert ranks(work, process_group=False, world_size=1) == [(False, 0, 1)]


def test_one_process_without_a_launcher_can_be_had(ranks: Ranks) -> None:
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

    def work() -> tuple[bool, bool]:
        return dist.is_torchelastic_launched(), any(name in os.environ for name in launcher)

    env = dict.fromkeys([*launcher, "TORCHELASTIC_RUN_ID"])
    assert ranks(work, process_group=False, world_size=1, env=env) == [(False, False)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size is 0: it must be at least 1"),
        ({"timeout": 0}, "timeout is 0: it must be more than 0 seconds"),
    ],
)
def test_senseless_limits_are_refused(ranks: Ranks, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        ranks(os.getpid, **arguments)


@pytest.mark.parametrize(
    ("setting", "expected"), [("in turns", [[0], [1], [0]]), ("all", [[0, 1], [0, 1, 2], [0, 1]])], ids=["turns", "all"]
)
def test_coverage_is_measured_on_all_ranks_or_on_one_a_call(
    monkeypatch: pytest.MonkeyPatch, setting: str, expected: list[list[int]]
) -> None:
    found = []

    def run(_: Pool, task: Task) -> list[Outcome]:
        with task.calls() as calls:
            found.append([call.rank for call in calls if call.coverage])
        return []

    monkeypatch.setattr(Pool, "run", run)
    monkeypatch.setattr("parallel_core.testing.task.wanted", lambda: "how")
    config: Any = SimpleNamespace(getini={"ranks_coverage": setting}.get, stash=pytest.Stash())
    with Ranks(measured=pytest_plugin.measured(config)) as ranks:
        for world_size in (2, 3, 2):
            ranks(print, world_size=world_size)
    assert found == expected


def test_nccl_without_enough_gpus_is_an_error_on_every_rank(ranks: Ranks) -> None:
    found = torch.cuda.device_count()
    world_size = found + 1
    outcomes = ranks.outcomes(os.getpid, world_size=world_size, backend="nccl")
    expected = f"backend 'nccl' needs one GPU a rank: found {found} for {world_size} ranks"
    assert [outcome.message for outcome in outcomes] == [expected] * world_size
