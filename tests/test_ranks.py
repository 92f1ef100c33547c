"""What ranks do together: one verdict, one error, the same bits everywhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel_core import agreeing, messages
from parallel_core import ranks as core
from parallel_core.errors import ConfigError, ParallelCoreError, RankError, StateDictError, WrapError
from parallel_core.testing import Ranks


class PluginError(WrapError):
    """An error class of a strategy's own, made from more than a message."""

    def __init__(self, what: str, count: int) -> None:
        super().__init__(f"{what} ({count})")


def caught(call: Callable[[], Any]) -> tuple[str, str, str]:
    """Return the class, the text and the cause of what a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__
    return "", "", ""


def test_without_a_process_group_this_is_a_world_of_one() -> None:
    assert (core.rank(), core.world_size()) == (0, 1)
    assert core.all_gather({"a": 1}) == [{"a": 1}]
    assert core.broadcast("mine") == "mine"
    tensor = torch.ones(2)
    core.broadcast_tensor(tensor)
    assert core.differing_tensors({"a": tensor, "b": torch.full((2,), torch.nan)}) == []
    core.agree(None)


def test_without_a_process_group_a_value_need_not_be_picklable() -> None:
    value = lambda: None  # noqa: E731  # what can't be pickled
    assert core.all_gather(value) == [value]
    assert core.broadcast(value) is value


def test_ranks_are_those_of_the_process_group(ranks: Ranks) -> None:
    assert ranks(lambda: (core.rank(), core.world_size()), world_size=3) == [(0, 3), (1, 3), (2, 3)]


def test_a_value_that_cannot_be_pickled_is_one_error_on_every_rank(ranks: Ranks) -> None:
    """The others wait for something: a rank that failed alone would leave them there."""

    def work() -> list[tuple[str, str, str]]:
        strange = lambda: None  # noqa: E731  # what can't be pickled
        mine = strange if core.rank() == 1 else "fine"
        roots = strange if core.rank() == 0 else "fine"
        return [caught(lambda: core.all_gather(mine)), caught(lambda: core.broadcast(roots))]

    first, second = ranks(work)
    assert first == second
    for rank, (kind, text, _) in zip((1, 0), first, strict=True):
        assert kind == "RankError"
        assert text.startswith(f"rank {rank} has a value that can't be sent to the other ranks by pickle: ")


def test_values_are_gathered_by_rank_and_broadcast_from_rank_0(ranks: Ranks) -> None:
    def work() -> tuple[Any, Any]:
        mine = {"rank": core.rank()}
        return core.all_gather(mine), core.broadcast(mine)

    everyone = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert ranks(work, world_size=3) == [(everyone, {"rank": 0})] * 3


def agreed(ranks: Ranks, errors: list[Exception | None], kind: type[ParallelCoreError] = RankError) -> list[Any]:
    def work() -> tuple[str, str, str]:
        return caught(lambda: core.agree(errors[core.rank()], kind))

    return ranks(work, world_size=len(errors))


@pytest.mark.parametrize("length", [0, 200, 300, 100_000])
def test_a_value_of_any_length_is_gathered_beside_short_ones(ranks: Ranks, length: int) -> None:
    def work() -> list[str]:
        return core.all_gather("long" + "x" * length if core.rank() == 1 else "short")

    assert ranks(work, world_size=3) == [["short", "long" + "x" * length, "short"]] * 3


def test_nothing_is_raised_where_no_rank_has_an_error(ranks: Ranks) -> None:
    assert agreed(ranks, [None, None, None]) == [("", "", "")] * 3


def test_an_error_of_one_rank_is_raised_on_every_rank_and_names_it(ranks: Ranks) -> None:
    results = agreed(ranks, [None, WrapError("no GPU"), None])
    assert [(kind, text) for kind, text, _ in results] == [("WrapError", "rank 1 of 3: no GPU")] * 3
    assert [cause for _, _, cause in results] == ["NoneType", "WrapError", "NoneType"]


def test_an_error_of_some_ranks_names_them(ranks: Ranks) -> None:
    results = agreed(ranks, [StateDictError("missing"), None, StateDictError("missing")])
    assert {(kind, text) for kind, text, _ in results} == {("StateDictError", "ranks 0, 2 of 3: missing")}


def test_one_error_of_all_ranks_is_raised_as_it_is(ranks: Ranks) -> None:
    assert agreed(ranks, [WrapError("no GPU")] * 3) == [("WrapError", "no GPU", "NoneType")] * 3


def test_different_errors_are_all_told_and_the_first_gives_the_class(ranks: Ranks) -> None:
    results = agreed(ranks, [StateDictError("missing"), ValueError("odd"), StateDictError("missing")])
    told = "ranks 0, 2 of 3: missing\nrank 1 of 3: ValueError: odd"
    assert {(kind, text) for kind, text, _ in results} == {("StateDictError", told)}
    assert results[1][2] == "ValueError"


def test_a_foreign_error_is_raised_as_the_kind_that_was_asked_for(ranks: Ranks) -> None:
    results = agreed(ranks, [KeyError("x"), None], WrapError)
    assert {(kind, text) for kind, text, _ in results} == {("WrapError", "rank 0 of 2: KeyError: 'x'")}
    assert [cause for _, _, cause in results] == ["KeyError", "NoneType"]


def test_the_same_foreign_error_of_all_ranks_names_none_and_has_its_cause(ranks: Ranks) -> None:
    assert agreed(ranks, [ValueError("x"), ValueError("x")]) == [("RankError", "ValueError: x", "ValueError")] * 2


def test_a_config_error_keeps_its_lines(ranks: Ranks) -> None:
    results = agreed(ranks, [None, ConfigError(["a: wrong", "b: wrong"])])
    told = "rank 1 of 2: 2 problems in the configuration:\n  - a: wrong\n  - b: wrong"
    assert {(kind, text) for kind, text, _ in results} == {("ConfigError", told)}


def test_an_error_class_of_a_strategys_own_reaches_the_others_as_the_one_it_is_derived_from(ranks: Ranks) -> None:
    def work() -> tuple[str, str, str]:
        return caught(lambda: core.agree(PluginError("no room", 3) if core.rank() else None))

    results = ranks(work)
    assert {(kind, text) for kind, text, _ in results} == {("WrapError", "rank 1 of 2: no room (3)")}
    assert results[1][2] == "PluginError"


def test_an_error_class_of_a_strategys_own_stays_what_it_is_where_all_ranks_have_it(ranks: Ranks) -> None:
    def work() -> tuple[str, str, str]:
        return caught(lambda: core.agree(PluginError("no room", 3)))

    assert ranks(work) == [("PluginError", "no room (3)", "NoneType")] * 2


def test_an_error_that_cannot_be_pickled_reaches_the_others_too(ranks: Ranks) -> None:
    def work() -> tuple[str, str, str]:
        class LocalError(StateDictError):
            pass

        error = LocalError("here")
        error.extra = lambda: None  # type: ignore[attr-defined]  # what can't be pickled
        return caught(lambda: core.agree(error if core.rank() == 1 else None))

    assert {result[:2] for result in ranks(work)} == {("StateDictError", "rank 1 of 2: here")}


def test_the_base_class_itself_can_be_agreed_on(ranks: Ranks) -> None:
    assert {result[:2] for result in agreed(ranks, [ParallelCoreError("x"), None])} == {
        ("ParallelCoreError", "rank 0 of 2: x")
    }


def test_an_error_without_a_text_is_told_by_its_class(ranks: Ranks) -> None:
    assert {result[:2] for result in agreed(ranks, [None, AssertionError()])} == {
        ("RankError", "rank 1 of 2: AssertionError: ")
    }


def test_a_block_under_agreement_fails_on_every_rank_at_once(ranks: Ranks) -> None:
    def work() -> tuple[tuple[str, str, str], float]:
        def block() -> None:
            with core.agreement(WrapError):
                if core.rank() == 2:
                    raise ValueError("odd model")

        start = time.monotonic()
        return caught(block), time.monotonic() - start

    results = ranks(work, world_size=3)
    assert {result[:2] for result, _ in results} == {("WrapError", "rank 2 of 3: ValueError: odd model")}
    assert max(seconds for _, seconds in results) < 5


def test_ranks_can_go_on_after_an_agreed_error(ranks: Ranks) -> None:
    def work() -> list[int]:
        caught(lambda: core.agree(ValueError("x") if core.rank() else None))
        gathered: list[int] = core.all_gather(core.rank())
        return gathered

    assert ranks(work) == [[0, 1]] * 2


@pytest.mark.parametrize("error", [ValueError("x"), None])
def test_without_a_process_group_an_agreement_is_the_blocks_own_error(error: Exception | None) -> None:
    def block() -> None:
        with core.agreement(WrapError):
            if error:
                raise error

    assert caught(block) == (("WrapError", "ValueError: x", "ValueError") if error else ("", "", ""))


@pytest.mark.parametrize("agreed", [core.agreement, core.comparison])
def test_what_the_other_ranks_can_not_be_told_is_raised_all_the_same(
    agreed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object) -> None:
        raise RankError("nobody there")

    monkeypatch.setattr(agreeing, "all_gather", unreachable)
    with pytest.raises(WrapError) as caught, agreed(WrapError):
        raise MemoryError("full")
    assert str(caught.value) == "MemoryError: full\nThe other ranks could not be told: nobody there"
    assert isinstance(caught.value.__cause__, MemoryError)
    monkeypatch.setattr(core.Comparison, "mine", 1, raising=False)
    with pytest.raises(RankError, match="nobody there"), agreed(WrapError):
        pass


def test_what_is_no_answer_of_a_rank_is_not_taken_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def gathered(data: bytes, size: int, group: object) -> list[bytes]:
        return [data.ljust(size, b"\0"), b"\x7f" * size]

    monkeypatch.setattr(messages, "_size", lambda group: 2)
    monkeypatch.setattr(messages, "_all_gather_bytes", gathered)
    with pytest.raises(
        RankError, match=r"^the ranks are not at the same call: .* \(none of them under `if rank == 0`\)"
    ):
        messages.all_gather(None)


def test_an_interrupt_is_not_taken_for_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), core.agreement():
        raise KeyboardInterrupt


def test_what_ranks_compare_is_exchanged_whole_only_where_it_differs(ranks: Ranks) -> None:
    def work() -> list[Any]:
        lengths: list[int] = []
        gather = messages._all_gather_bytes

        def counted(data: bytes, size: int, group: Any) -> list[bytes]:
            lengths.append(size)
            return gather(data, size, group)

        long, found = "x" * 10_000, list[Any]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(messages, "_all_gather_bytes", counted)
            for value in (long, f"{long}{core.rank()}"):
                with core.comparison() as said:
                    said.mine = value
                found.append([each.removeprefix(long) for each in said.by_rank])
            try:
                with core.comparison(WrapError) as said:
                    said.mine = str(1 // core.rank())
            except WrapError as error:
                found.append(str(error))
        return [found, lengths[:2], len(lengths)]

    message = "rank 0 of 2: ZeroDivisionError: integer division or modulo by zero"
    alike, different, first_long, failed = 1, 1, 2, 1
    expected = [[["", ""], ["0", "1"], message], [256, 256], alike + different + first_long + failed]
    assert ranks(work) == [expected] * 2


TENSORS: dict[str, Callable[[], Tensor]] = {
    "float32": lambda: torch.randn(3, 4),
    "float64": lambda: torch.randn(3, dtype=torch.float64),
    "bfloat16": lambda: torch.randn(3, 4).to(torch.bfloat16),
    "float16": lambda: torch.randn(3, 4).to(torch.float16),
    "fp8": lambda: torch.randn(3, 4).to(torch.float8_e4m3fn),
    "int64": lambda: torch.randint(1000, (3, 4)),
    "uint8": lambda: torch.randint(200, (5,), dtype=torch.uint8),
    "bool": lambda: torch.rand(9) > 0.5,
    "complex": lambda: torch.randn(3, 4, dtype=torch.complex64),
    "a conjugate view": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "no dimensions": lambda: torch.randn(()),
    "empty": lambda: torch.randn(0, 3),
    "one element of many": lambda: torch.randn(8)[::8],
    "transposed": lambda: torch.randn(3, 4).t(),
    "every second column": lambda: torch.randn(3, 8)[:, ::2],
    "a part of a bigger one": lambda: torch.randn(10)[3:7],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "a parameter": lambda: torch.nn.Parameter(torch.randn(3, 4)),
    "a parameter's transposed view": lambda: torch.nn.Parameter(torch.randn(3, 4)).t(),
}


@pytest.mark.parametrize("together", [False, True], ids=["one by one", "together"])
def test_a_tensor_becomes_rank_0s_bit_for_bit_whatever_it_is(ranks: Ranks, together: bool) -> None:
    def work() -> dict[str, tuple[Tensor, Tensor, bool]]:
        torch.manual_seed(core.rank())
        # One that fills a message of its own stands between the small ones.
        tensors = {"large": torch.randn(1 << 18), **{name: make() for name, make in TENSORS.items()}}
        order = sorted(tensors)
        places = {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in tensors.items()}
        before = {name: core.bits(tensor).clone() for name, tensor in tensors.items()}
        if together:
            core.broadcast_tensors(tensors[name] for name in order)
        else:
            for name in order:
                core.broadcast_tensor(tensors[name])
        return {
            name: (before[name], core.bits(tensor), (tensor.data_ptr(), tensor.stride()) == places[name])
            for name, tensor in tensors.items()
        }

    zero, one = ranks(work)
    for name, (before, after, same_object) in one.items():
        assert same_object, name
        assert zero[name][1].equal(zero[name][0]), f"{name}: rank 0's own was changed"
        assert after.equal(zero[name][0]), name
        assert name == "empty" or not after.equal(before), f"{name}: the test proves nothing"


def test_small_tensors_are_sent_in_one_message_and_large_ones_without_a_copy(ranks: Ranks) -> None:
    def work() -> list[int]:
        sizes = []
        broadcast = dist.broadcast

        def counted(tensor: Tensor, src: int) -> None:
            sizes.append(tensor.nbytes)
            broadcast(tensor, src=src)

        small, large = [torch.zeros(1000) for _ in range(300)], [torch.zeros(1 << 18) for _ in range(2)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "broadcast", counted)
            core.broadcast_tensors([*small[:10], large[0], *small[10:], large[1]])
        return sizes

    # 262 of 4000 bytes are what goes into 1 MiB.
    expected = [40_000, 1 << 20, 262 * 4000, 28 * 4000, 1 << 20]
    assert ranks(work) == [expected] * 2


def test_what_surrounds_a_view_is_not_overwritten(ranks: Ranks) -> None:
    def work() -> Tensor:
        whole = torch.full((3, 6), float(core.rank()))
        core.broadcast_tensor(whole[:, 1::2])
        return whole

    assert ranks(work)[1].tolist() == [[1.0, 0.0] * 3] * 3


def test_a_tensor_that_is_expanded_from_one_element_is_broadcast(ranks: Ranks) -> None:
    def work() -> list[list[float]]:
        alone, first, second = (torch.full((1,), float(core.rank() + number)).expand(4) for number in (1, 2, 3))
        core.broadcast_tensor(alone)
        core.broadcast_tensors([first, second])
        return [tensor.tolist() for tensor in (alone, first, second)]

    assert ranks(work) == [[[1.0] * 4, [2.0] * 4, [3.0] * 4]] * 2


def test_bits_make_not_a_number_equal_to_itself_and_minus_zero_unlike_zero() -> None:
    nan = torch.tensor([torch.nan])
    assert core.bits(nan).equal(core.bits(nan.clone()))
    assert not core.bits(torch.tensor([0.0])).equal(core.bits(torch.tensor([-0.0])))
    assert core.bits(torch.ones(2, 3, dtype=torch.bool)).tolist() == [1] * 6
    assert core.bits(torch.tensor(1.0)).numel() == 4
    assert core.bits(torch.empty(0)).numel() == 0


def test_tensors_that_differ_on_any_rank_are_named_the_same_everywhere(ranks: Ranks) -> None:
    def work() -> tuple[list[str], list[float]]:
        rank = core.rank()
        tensors = {
            "same": torch.ones(3),
            "nan": torch.tensor([1.0, torch.nan]),
            "on rank 2": torch.tensor([float(rank == 2)]),
            "on rank 1": torch.tensor([1, rank % 2]).t(),
            "minus zero": torch.tensor([-0.0 if rank == 1 else 0.0]),
            "transposed": torch.arange(6.0).reshape(2, 3).t(),
            "empty": torch.empty(0),
            "bool": torch.tensor([True]),
        }
        return core.differing_tensors(tensors), tensors["on rank 2"].tolist()

    results = ranks(work, world_size=3)
    assert [names for names, _ in results] == [["on rank 2", "on rank 1", "minus zero"]] * 3
    assert [values for _, values in results] == [[0.0], [0.0], [1.0]], "comparing must not change the tensors"


def test_nothing_differs_where_there_are_no_tensors(ranks: Ranks) -> None:
    assert ranks(lambda: core.differing_tensors({})) == [[], []]


def test_comparing_takes_the_memory_of_one_tensor_at_a_time(ranks: Ranks) -> None:
    def work() -> int:
        tensors = {str(index): torch.ones(1 << 20) for index in range(64)}  # 4 MiB each, written to
        core.differing_tensors({"warm up": tensors["0"]})
        dist.barrier()
        before = resident()
        core.differing_tensors(tensors)
        return resident() - before

    # Half of what all of them take; what a process touches for the first time here can be a fifth.
    assert max(ranks(work)) < 128 << 20


def resident() -> int:
    """Return the highest memory that this process ever held, in bytes."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_ranks_start_alike_from_rank_0s_values_or_raise_with_nothing_changed(ranks: Ranks) -> None:
    def work(broadcast: bool) -> list[Any]:
        tensors = {"a": torch.zeros(2), "b": torch.full((3,), float(core.rank()))}
        try:
            core.start_alike(tensors, broadcast=broadcast, field="mine_sync")
        except WrapError as error:
            return [str(error), tensors["b"].tolist()]
        return ["no error", tensors["b"].tolist()]

    message = (
        "initial values differ between ranks, first those of 'b' (1 of 2 tensors); seed all ranks alike, or set "
        "mine_sync = true"
    )
    assert ranks(work, True) == [["no error", [0.0] * 3]] * 2
    assert ranks(work, False) == [[message, [0.0] * 3], [message, [1.0] * 3]]
