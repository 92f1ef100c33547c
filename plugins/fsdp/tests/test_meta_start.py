"""A model from the meta device is cut into shards unit by unit, and has the values of one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parallel_core
from parallel_core import DistributedConfig, WrapError
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.models import CASES
from parallel_core.testing.modules import Residual

MIB = 2**20


def config(**settings: Any) -> DistributedConfig:
    given = {"fsdp_mixed_precision": "fp32", "fsdp_auto_wrap_min_params": 50, **settings}
    return DistributedConfig(parallel_strategy="fsdp", **given)


def started(make: Any, state_dict: dict[str, Any] | None = None, **settings: Any) -> nn.Module:
    with torch.device("meta"):
        model = make()
    answer = parallel_core.wrap_model_for_training(model, config(**settings), state_dict=state_dict)
    assert answer is not None
    return answer


class Deep(nn.Module):
    """Units inside a unit, with modules of the outer one before and after them, and a buffer that is not saved."""

    freqs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = nn.ModuleList(Residual() for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6)
        self.register_buffer("freqs", torch.empty(6), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.freqs.copy_(torch.arange(6.0) / 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) * self.freqs
        for part in self.inner:
            x = part(x)
        out: Tensor = self.last(self.norm(x))
        return out


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 6), Deep(), Deep(), nn.Linear(6, 6))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("threshold", [0, 50, 90, 400, 10**9])
def test_the_values_are_those_of_one_process_whatever_the_units(ranks: Ranks, world_size: int, threshold: int) -> None:
    def work() -> list[Any]:
        torch.manual_seed(collective.rank())  # rank 0's count
        model = started(deep, fsdp_auto_wrap_min_params=threshold)
        buffers = [buffer for name, buffer in model.named_buffers() if name.endswith("freqs")]
        return [parallel_core.model_state_dict(model), [buffer.tolist() for buffer in buffers]]

    torch.manual_seed(0)
    expected = deep().state_dict()
    (found, buffers), *others = ranks(work, world_size=world_size)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert buffers == [(torch.arange(6.0) / 7).tolist()] * 2
    assert all(other == [{}, buffers] for other in others)


def test_it_is_wrapped_as_a_model_with_values_is_and_trains_alike(ranks: Ranks) -> None:
    def work(precision: str) -> list[Any]:
        found = []
        torch.manual_seed(0)
        built = parallel_core.wrap_model_for_training(deep(), config(fsdp_mixed_precision=precision))
        assert built is not None
        torch.manual_seed(0)
        for model in (built, started(deep, fsdp_mixed_precision=precision)):
            units = [
                (name, module.mixed_precision.param_dtype)
                for name, module in model.named_modules()
                if isinstance(module, FullyShardedDataParallel)
            ]
            optimizer = parallel_core.wrap_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
            losses = []
            for seed in range(3 if precision == "fp32" else 0):
                inputs, targets = CASES["blocks"].batch(seed)
                loss = nn.functional.mse_loss(model(inputs).float(), targets)
                losses.append(loss.item())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            found.append([units, losses, parallel_core.wrap_report(model).held])  # type: ignore[union-attr]  # wrapped
        return [found[0] == found[1], len(found[0][0])]

    assert ranks(work, "fp32") == [[True, 11]] * 2
    assert ranks(work, "bf16") == [[True, 13]] * 2  # two batch norms more


def test_tied_parameters_stay_tied(ranks: Ranks) -> None:
    def work() -> list[Any]:
        model = started(CASES["language_model"].make)
        inputs, targets = CASES["language_model"].batch(seed=0)
        CASES["language_model"].loss(model(inputs), targets).backward()
        saved = parallel_core.model_state_dict(model)
        report = parallel_core.wrap_report(model)
        assert report is not None
        return [report.tied, not saved or torch.equal(saved["embedding.weight"], saved["head.weight"])]

    assert ranks(work) == [[(("embedding.weight", "head.weight"),), True]] * 2


def test_from_a_state_dict_the_values_are_its_own_and_the_rest_is_computed(ranks: Ranks) -> None:
    def work(synced: bool) -> list[Any]:
        torch.manual_seed(3)
        saved = deep().state_dict() if collective.rank() == 0 else None
        model = started(deep, saved, fsdp_sync_module_states=synced)
        freqs = dict(model.named_buffers())["_fsdp_wrapped_module.2._fsdp_wrapped_module.freqs"]
        return [parallel_core.model_state_dict(model), freqs.tolist()]

    torch.manual_seed(3)
    expected = deep().state_dict()
    for synced in (True, False):
        (found, first), (_, second) = ranks(work, synced)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert first == second == (torch.arange(6.0) / 7).tolist()


def test_values_that_differ_between_ranks_are_named_where_they_are_not_taken_from_rank_0(ranks: Ranks) -> None:
    def work(same: bool) -> str:
        torch.manual_seed(0 if same else collective.rank())
        try:
            started(CASES["blocks"].make, fsdp_sync_module_states=False)
        except WrapError as error:
            return str(error)
        return "no error"

    assert ranks(work, True) == ["no error"] * 2
    first, second = ranks(work, False)
    assert first == second
    assert first.startswith(
        "initial values differ between ranks, first those of 'blocks.0.up.weight' (2 of 2 tensors);"
    )


class Meddling(nn.Module):
    """Initialises a layer that is a unit of its own by now."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.normal_(self.layer.weight)


class MeddlingThroughData(Meddling):
    """The same, by a way that autograd does not see."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.layer.weight.data.normal_()


class MeddlingByReset(Meddling):
    """The same, and what it calls fails on a shard."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        self.layer.reset_parameters()


@pytest.mark.parametrize("kind", [Meddling, MeddlingThroughData])
def test_a_module_that_writes_to_the_shards_of_another_unit_is_refused(ranks: Ranks, kind: type[Meddling]) -> None:
    def work(threshold: int) -> str:
        try:
            started(lambda: nn.Sequential(kind()), fsdp_auto_wrap_min_params=threshold)
        except WrapError as error:
            return str(error)
        return "no error"

    assert ranks(work, 48) == ["no error"] * 2  # all of it is one unit
    text = (
        f"{kind.__name__} writes to parameters that are cut into shards already when it is reset; written to: "
        "'0.layer.weight'; initialise them in their own modules, or build the model on a device; this model has to be "
        "built again"
    )
    assert ranks(work, 42) == [text, text]


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that are made under it and are alive, after each operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.seen: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(answer):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                reference = StorageWeakRef(tensor.untyped_storage())
                self.seen[reference.cdata] = reference
        self.peak = max(self.peak, sum(self.sizes()))
        return answer

    def sizes(self) -> Iterator[int]:
        for key, reference in list(self.seen.items()):
            # None where the storage is gone; FSDP also keeps some and gives their memory back.
            storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self.seen[key]
            else:
                yield storage.nbytes()


class Stack(nn.Sequential):
    """64 MiB in units of 4 MiB."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))


@pytest.mark.parametrize("from_state_dict", [False, True])
def test_a_rank_holds_its_shards_and_a_few_units_at_most(ranks: Ranks, from_state_dict: bool) -> None:
    def work() -> list[float]:
        saved = Stack().state_dict() if from_state_dict and collective.rank() == 0 else {}
        with Live() as live:
            model = started(Stack, saved if from_state_dict else None, fsdp_auto_wrap_min_params=1024 * 1024)
            held = sum(live.sizes())
        del model
        return [live.peak / MIB, held / MIB]

    for peak, held in ranks(work):
        assert 32 <= held < 33
        assert 36 <= peak <= 32 + 4 * 4


def test_a_model_with_values_is_counted_whole_by_the_same_measure(ranks: Ranks) -> None:
    def work() -> int:
        with Live() as live:
            model = parallel_core.wrap_model_for_training(Stack(), config(fsdp_auto_wrap_min_params=1024 * 1024))
        del model
        return int(live.peak / MIB)

    assert all(peak >= 64 for peak in ranks(work))
