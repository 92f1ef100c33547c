"""One tensor between a rank and all ranks, for every mix of plain tensor and DTensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from parallel_core import ranks as core
from parallel_core import tensors
from parallel_core.hookspecs import StateDictType
from parallel_core.testing import Ranks

FULL, SHARDED = StateDictType.FULL, StateDictType.SHARDED


def on_mesh(tensor: Tensor, placement: Any) -> DTensor:
    return distribute_tensor(tensor, init_device_mesh("cpu", (core.world_size(),)), [placement])


def test_a_snapshot_is_a_copy_on_rank_0_and_nothing_elsewhere(ranks: Ranks) -> None:
    def work() -> Tensor | None:
        tensor = torch.arange(6.0).reshape(2, 3).t().requires_grad_()
        copied = tensors.snapshot(tensor)
        with torch.no_grad():
            tensor.zero_()
        if copied is not None:
            assert not copied.requires_grad
            assert copied.is_contiguous()
        return copied

    first, second = ranks(work)
    assert first.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert second is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_a_snapshot_keeps_the_dtype(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, dtype=dtype)
    copied = tensors.snapshot(tensor)
    assert copied is not None
    assert copied.dtype == dtype
    assert copied.equal(tensor)
    assert copied.data_ptr() != tensor.data_ptr()


def test_a_snapshot_of_a_part_does_not_hold_the_whole() -> None:
    copied = tensors.snapshot(torch.ones(1000)[:2])
    assert copied is not None
    assert copied.untyped_storage().nbytes() == 8


def test_an_entry_of_a_full_state_dict_is_whole_and_a_snapshot(ranks: Ranks) -> None:
    def work() -> list[Any]:
        whole = torch.arange(5.0)
        entries = [
            tensors.entry(value, FULL) for value in (whole, on_mesh(whole, Shard(0)), on_mesh(whole, Replicate()))
        ]
        whole.zero_()
        return [type(entry).__name__ for entry in entries] + [entry.tolist() for entry in entries if entry is not None]

    first, second = ranks(work)
    assert first == ["Tensor"] * 3 + [[0.0, 1.0, 2.0, 3.0, 4.0]] * 3
    assert second == ["NoneType"] * 3


def test_an_entry_of_a_sharded_state_dict_is_the_value_itself_detached(ranks: Ranks) -> None:
    def work() -> list[Any]:
        plain = torch.arange(4.0).requires_grad_()
        sharded = on_mesh(torch.arange(4.0), Shard(0)).requires_grad_()
        entries = [tensors.entry(plain, SHARDED), tensors.entry(sharded, SHARDED)]
        assert not any(entry.requires_grad for entry in entries)
        assert entries[0].data_ptr() == plain.data_ptr()
        assert isinstance(entries[1], DTensor)
        return [entries[1].to_local().tolist()]

    assert ranks(work) == [[[0.0, 1.0]], [[2.0, 3.0]]]


@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_an_entry_that_is_no_tensor_is_copied(kind: StateDictType) -> None:
    value = {"a": [1, 2]}
    entry = tensors.entry(value, kind)
    assert entry == value
    assert entry["a"] is not value["a"]
    assert tensors.entry(3, kind) == 3


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_a_tensor_is_cut_into_shards_without_communication(ranks: Ranks, size: int) -> None:
    def work() -> tuple[Any, ...]:
        whole = torch.arange(size * 2.0).reshape(size, 2)
        mesh = init_device_mesh("cpu", (core.world_size(),))
        cut = tensors.shard(whole.requires_grad_(), mesh)
        held = cut.to_local().untyped_storage().nbytes()
        return cut.placements, tuple(cut.shape), cut.to_local().numel(), held, cut.full_tensor().equal(whole)

    results = ranks(work, world_size=3)
    assert sum(numel for _, _, numel, _, _ in results) == size * 2
    for placements, shape, numel, held, same in results:
        assert (placements, shape, same) == ((Shard(0),), (size, 2), True)
        assert held == numel * 4, "the shard keeps the whole tensor alive"


Make = Callable[[Tensor], Tensor]

LAYOUTS: dict[str, Make] = {
    "plain": lambda tensor: tensor,
    "sharded": lambda tensor: on_mesh(tensor, Shard(0)),
    "sharded in dimension 1": lambda tensor: on_mesh(tensor, Shard(1)),
    "replicated": lambda tensor: on_mesh(tensor, Replicate()),
}


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(10).reshape(5, 2).to(dtype)


@pytest.mark.parametrize("target_layout", LAYOUTS)
def test_a_full_entry_of_rank_0_is_assigned_on_every_rank(ranks: Ranks, target_layout: str) -> None:
    def work() -> list[list[float]]:
        target = LAYOUTS[target_layout](torch.zeros(5, 2).requires_grad_())
        entry = values() if core.rank() == 0 else torch.empty(5, 2, device="meta")
        tensors.assign(target, entry, FULL)
        found: list[list[float]] = whole_of(target).detach().tolist()
        return found

    assert ranks(work, world_size=3) == [values().tolist()] * 3


@pytest.mark.parametrize("entry_layout", LAYOUTS)
@pytest.mark.parametrize("target_layout", LAYOUTS)
def test_a_sharded_entry_is_assigned_whatever_the_two_are(ranks: Ranks, target_layout: str, entry_layout: str) -> None:
    def work() -> list[list[float]]:
        target = LAYOUTS[target_layout](torch.zeros(5, 2).requires_grad_())
        entry = LAYOUTS[entry_layout](values())
        tensors.assign(target, entry, SHARDED)
        assert whole_of(entry).equal(values()), "the entry is the caller's"
        found: list[list[float]] = whole_of(target).detach().tolist()
        return found

    assert ranks(work) == [values().tolist()] * 2


@pytest.mark.parametrize("target_layout", LAYOUTS)
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_an_entry_of_another_dtype_is_converted(ranks: Ranks, target_layout: str, kind: StateDictType) -> None:
    def work() -> tuple[torch.dtype, bool]:
        target = LAYOUTS[target_layout](torch.zeros(5, 2, dtype=torch.bfloat16))
        entry = values(torch.float64)
        if kind is FULL and core.rank():
            entry = torch.empty(5, 2, dtype=torch.float64, device="meta")
        tensors.assign(target, entry, kind)
        return target.dtype, whole_of(target).equal(values(torch.bfloat16))

    assert ranks(work) == [(torch.bfloat16, True)] * 2


def test_assigning_fills_a_tensor_that_is_not_contiguous_and_leaves_its_neighbours(ranks: Ranks) -> None:
    def work() -> list[list[float]]:
        whole = torch.zeros(2, 4)
        entry = torch.ones(2, 2) if core.rank() == 0 else torch.empty(2, 2, device="meta")
        tensors.assign(whole[:, ::2], entry, FULL)
        found: list[list[float]] = whole.tolist()
        return found

    assert ranks(work) == [[[1.0, 0.0, 1.0, 0.0]] * 2] * 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3,)])
def test_every_dtype_and_shape_of_a_buffer_is_assigned(
    ranks: Ranks, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    def work() -> bool:
        expected = (torch.arange(3)[: shape[0]] if shape else torch.tensor(1)).to(dtype)
        target = torch.zeros(shape, dtype=dtype)
        entry = expected if core.rank() == 0 else torch.empty(shape, dtype=dtype, device="meta")
        tensors.assign(target, entry, FULL)
        return target.equal(expected)

    assert ranks(work) == [True, True]


def test_a_full_entry_of_a_world_of_one_is_assigned() -> None:
    target = torch.nn.Parameter(torch.zeros(2))
    tensors.assign(target, torch.ones(2), FULL)
    assert target.tolist() == [1.0, 1.0]
    assert target.grad_fn is None


@pytest.mark.parametrize("parameter_layout", LAYOUTS)
@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_an_optimizers_entry_is_laid_out_as_its_parameter(
    ranks: Ranks, parameter_layout: str, kind: StateDictType
) -> None:
    def work() -> tuple[bool, bool, bool, bool]:
        parameter = LAYOUTS[parameter_layout](torch.zeros(5, 2)).requires_grad_()
        entry = values(torch.float64)
        given = entry if kind is SHARDED or core.rank() == 0 else torch.empty(5, 2, dtype=torch.float64, device="meta")
        found = tensors.placed(given, parameter, kind)
        same_layout = getattr(found, "placements", None) == getattr(parameter, "placements", None)
        return same_layout, found.dtype is torch.float64, whole_of(found).equal(entry), found.requires_grad

    assert ranks(work) == [(True, True, True, False)] * 2


@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_an_optimizers_entry_of_another_shape_is_whole_on_every_rank(ranks: Ranks, kind: StateDictType) -> None:
    def work() -> tuple[float, bool]:
        parameter = on_mesh(torch.zeros(5, 2), Shard(0))
        step = torch.tensor(7.0)
        given = step if kind is SHARDED or core.rank() == 0 else torch.empty((), device="meta")
        found = tensors.placed(given, parameter, kind)
        return found.item(), found.data_ptr() == step.data_ptr()

    assert ranks(work) == [(7.0, False)] * 2


@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_an_optimizers_entry_of_another_shape_can_be_computed_with_beside_gradients(
    ranks: Ranks, kind: StateDictType
) -> None:
    def work() -> list[Any]:
        parameter, entry = on_mesh(torch.zeros(4, 2), Shard(0)), torch.arange(8.0)
        given = entry if kind is SHARDED or core.rank() == 0 else torch.empty(8, device="meta")
        found = tensors.placed(given, parameter, kind)
        return [found.placements == (Replicate(),), (parameter.reshape(8) + found).full_tensor().tolist()]

    assert ranks(work) == [[True, [float(number) for number in range(8)]]] * 2


def test_an_optimizers_entry_shares_no_memory_with_the_state_dict() -> None:
    parameter, entry = torch.nn.Parameter(torch.zeros(3)), torch.ones(3)
    for kind in (FULL, SHARDED):
        tensors.placed(entry, parameter, kind).zero_()
        assert entry.tolist() == [1.0] * 3


def test_an_optimizers_entry_that_is_no_tensor_stays_as_it_is() -> None:
    assert tensors.placed(7, torch.zeros(1), FULL) == 7
    assert tensors.placed(None, torch.zeros(1), SHARDED) is None


@pytest.mark.parametrize("entry_layout", LAYOUTS)
def test_a_sharded_entry_is_whole_on_every_rank(ranks: Ranks, entry_layout: str) -> None:
    def work() -> list[list[float]]:
        found: list[list[float]] = tensors.whole(LAYOUTS[entry_layout](values()), SHARDED, torch.device("cpu")).tolist()
        return found

    assert ranks(work) == [values().tolist()] * 2


def test_a_full_entry_is_whole_on_every_rank_in_its_own_dtype(ranks: Ranks) -> None:
    def work() -> tuple[torch.dtype, list[bool]]:
        entry = torch.tensor([True, False]) if dist.get_rank() == 0 else torch.empty(2, dtype=torch.bool, device="meta")
        found = tensors.whole(entry, FULL, torch.device("cpu"))
        return found.dtype, found.tolist()

    assert ranks(work) == [(torch.bool, [True, False])] * 2
