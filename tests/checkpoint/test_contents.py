"""Everything that a model, an optimizer or a training can consist of comes back as it was, or is refused by name."""

from __future__ import annotations

import importlib.metadata
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import parallel_core
from parallel_core import CheckpointError, DistributedConfig, hookimpl
from parallel_core import ranks as collective
from parallel_core.defaults import load_model_state_dict, load_optimizer_state_dict
from parallel_core.record import Layout, Record, attach
from parallel_core.registry import Registration
from parallel_core.strategy import Strategy
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import KINDS, Run, differences
from parallel_core.testing.models import CASES

CONFIGS = {
    "bare": None,
    "ddp": DistributedConfig(parallel_strategy="ddp"),
    "fsdp": DistributedConfig(parallel_strategy="fsdp", fsdp_mixed_precision="fp32", fsdp_auto_wrap_min_params=0),
    "fsdp2": DistributedConfig(parallel_strategy="fsdp2", fsdp2_mixed_precision="fp32", fsdp2_auto_wrap_min_params=0),
}
NOT_UNDER_DDP = ("float8", "int16", "uint16", "uint32", "uint64")  # gloo has no such
DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8,
    torch.bool,
)  # fmt: skip
ODD_NAMES = ("a/b", "ü", "a b", "line\nbreak", "$tensor", "_metadata_", "'quoted'", "model", "0", "\U0001f600")


class Everything(nn.Module):
    """Buffers of every dtype, shape and name that there is, and one parameter to train."""

    def __init__(self, seed: int, left_out: tuple[str, ...] = ()) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.empty(shape, dtype=dtype)
            most = 2 if dtype is torch.bool else 256
            collective.bits(tensor).random_(0, most, generator=generator)  # NaNs and all
            return tensor

        self.weight = nn.Parameter(torch.randn(3, generator=generator))
        for dtype in (each for each in DTYPES if not str(each).removeprefix("torch.").startswith(left_out)):
            for shape in ((), (0,), (1,), (3, 5), (2, 0, 3), (2, 3, 4)):
                self.register_buffer(f"{dtype}{list(shape)}".replace(".", "_"), filled(shape, dtype))
        self.register_buffer("transposed", filled((4, 3), torch.float32).t())
        for name in ODD_NAMES:
            self._buffers[name] = filled((2,), torch.float32)  # register_buffer refuses some that state dicts may have

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.weight


class Odd(nn.Module):
    """Parameters under odd names, some smaller than the number of ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name in ODD_NAMES:
            part = nn.Linear(3, 1)
            for parameter in part.parameters():
                nn.init.normal_(parameter, generator=generator)
            self._modules[name] = part

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([part(inputs).sum() for part in self._modules.values() if part is not None]).sum()


def wrapped(model: nn.Module, strategy: str) -> nn.Module:
    config = CONFIGS[strategy]
    answer = None if config is None else parallel_core.wrap_model_for_training(model, config)
    return model if answer is None else answer


def came_back(kind: str, strategy: str, place: Path) -> list[str]:
    """Save models of all kinds, load them into others, and return what has other bits then."""
    found = []
    left_out = NOT_UNDER_DDP if strategy == "ddp" else ()
    for make in (partial(Everything, left_out=left_out), Odd, lambda seed: nn.Sequential()):
        model, other = wrapped(make(1), strategy), wrapped(make(2), strategy)
        optimizers = [
            torch.optim.AdamW(each.parameters()) if list(each.parameters()) else None for each in (model, other)
        ]
        if make is Odd and optimizers[0] is not None:
            model(torch.ones(2, 3)).backward()
            optimizers[0].step()
        parallel_core.save_checkpoint(place, model, optimizers[0], state_dict_type=kind)
        loaded = parallel_core.load_checkpoint(place, other, optimizers[1])
        assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
        found += differences(parallel_core.model_state_dict(other), parallel_core.model_state_dict(model))
        if optimizers[0] is not None and optimizers[1] is not None:
            found += differences(
                parallel_core.optimizer_state_dict(other, optimizers[1]),
                parallel_core.optimizer_state_dict(model, optimizers[0]),
            )
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_dtype_shape_and_name_comes_back_bit_for_bit(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    def work() -> list[str]:
        return [
            f"{strategy}: {line}" for strategy in CONFIGS for line in came_back(kind, strategy, tmp_path / strategy)
        ]

    assert ranks(work) == [[], []]


def test_a_buffer_whose_elements_share_memory_comes_back(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("expanded", torch.tensor([[3.0], [4.0]]).expand(2, 5))
    parallel_core.save_checkpoint(tmp_path / "a", model)
    model.get_buffer("expanded")[:, 0] = 0
    parallel_core.load_checkpoint(tmp_path / "a", model)
    assert model.get_buffer("expanded").tolist() == [[3.0] * 5, [4.0] * 5]


def test_extra_state_of_modules_comes_back(ranks: Ranks, tmp_path: Path) -> None:
    def work(kind: str) -> list[str]:
        found = []
        for strategy, config in list(CONFIGS.items())[1:]:
            run, other = Run("extra_state", config, seed=1), Run("extra_state", config, seed=2)
            run.train(range(2))
            parallel_core.save_checkpoint(tmp_path / strategy, run.model, run.optimizer, state_dict_type=kind)
            parallel_core.load_checkpoint(tmp_path / strategy, other.model, other.optimizer)
            found += differences(other.full(), run.full(), where=strategy)
        return found

    for kind in KINDS:
        assert ranks(work, kind) == [[], []]


def test_a_name_that_the_format_has_another_use_for_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("__metadata__", torch.ones(1))
    with pytest.raises(CheckpointError, match="'__metadata__' can't be the name of a saved tensor"):
        parallel_core.save_checkpoint(tmp_path / "a", model)


def test_extra_state_that_needs_pickle_is_refused_by_name(tmp_path: Path) -> None:
    class Odd(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"seen": {1, 2}}

        def set_extra_state(self, state: Any) -> None:
            raise AssertionError

    with pytest.raises(
        CheckpointError, match=r"'0\._extra_state'\['seen'\]: found builtins\.set, which can't be saved"
    ):
        parallel_core.save_checkpoint(tmp_path / "a", nn.Sequential(Odd(2, 2)))


EXTRAS: list[Any] = [
    None,
    {"step": 3, "loss": float("nan"), "best": float("-inf"), "tiny": 5e-324, "name": "ü\n", "raw": b"\0\xff"},
    [1, (2, [3.5, True, None]), {}, {1: "one", (2, 3): "pair", None: 0}, 2**80, -1],
    {"$tensor": 1, "$tuple": [1], "a.b": Counter({"x": 2})},
]  # fmt: skip


@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_data_comes_back(tmp_path: Path, extra: Any) -> None:
    parallel_core.save_checkpoint(tmp_path / "a", model := nn.Linear(2, 2), extra=extra)
    found = parallel_core.load_checkpoint(tmp_path / "a", model).extra
    assert repr(found) == repr(extra)  # NaN is not equal to itself


def test_schedulers_scalers_and_other_objects_come_back_by_name(tmp_path: Path) -> None:
    def made() -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedulers = [
            torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5]),
            torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=20, cycle_momentum=False),
        ]
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        other = nn.BatchNorm1d(3)  # an averaged model, say: tensors too
        return model, optimizer, {type(each).__name__: each for each in (*schedulers, scaler, other)}

    model, optimizer, objects = made()
    for _ in range(4):
        optimizer.step()
        for name in ("MultiStepLR", "CosineAnnealingWarmRestarts", "OneCycleLR"):
            objects[name].step()
    objects["GradScaler"].scale(torch.ones(1))
    objects["GradScaler"].update(new_scale=4.0)
    objects["BatchNorm1d"](torch.randn(4, 3))
    parallel_core.save_checkpoint(tmp_path / "a", model, optimizer, objects=objects)
    other_model, other_optimizer, others = made()
    parallel_core.load_checkpoint(tmp_path / "a", other_model, other_optimizer, objects=others)
    for name, thing in objects.items():
        expected, found = thing.state_dict(), others[name].state_dict()
        tensors = {key for key, value in expected.items() if isinstance(value, torch.Tensor)}
        assert differences({key: found[key] for key in tensors}, {key: expected[key] for key in tensors}) == []
        assert {k: v for k, v in found.items() if k not in tensors} == {
            k: v for k, v in expected.items() if k not in tensors
        }
    assert isinstance(others["MultiStepLR"].milestones, Counter)
    assert other_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


def test_an_object_saved_without_state_is_left_as_it_is(tmp_path: Path) -> None:
    """A gradient scaler that was disabled, say: torch's own refuses such a state where it is enabled."""
    model, enabled = nn.Linear(2, 2), torch.amp.GradScaler("cpu", init_scale=8.0)
    parallel_core.save_checkpoint(tmp_path / "a", model, objects={"scaler": torch.amp.GradScaler("cpu", enabled=False)})
    parallel_core.load_checkpoint(tmp_path / "a", model, objects={"scaler": enabled})
    assert enabled.get_scale() == 8.0


def test_an_object_that_does_not_take_its_state_leaves_all_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["a"] == 2:
                raise KeyError("b")

    run = Run("blocks", None)
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)  # type: ignore[arg-type]  # it has one
    picky = Picky()
    parallel_core.save_checkpoint(
        tmp_path / "a", run.model, run.optimizer, objects={"scheduler": scheduler, "picky": picky}
    )
    run.train(range(1))
    scheduler.step()
    before = run.full(), scheduler.state_dict()
    monkeypatch.setattr(picky, "load_state_dict", lambda state: {}[state["a"]] if state == {"a": 1} else None)
    monkeypatch.setattr(picky, "state_dict", lambda: {"a": 3})
    objects = {"scheduler": scheduler, "picky": picky}
    with pytest.raises(CheckpointError, match=r"objects\['picky'\] \(Picky\) does not take the state that was saved"):
        parallel_core.load_checkpoint(tmp_path / "a", run.model, run.optimizer, objects=objects)
    assert differences(run.full(), before[0]) == []
    assert scheduler.state_dict() == before[1]
    with pytest.raises(CheckpointError, match=r"has no state of objects\['loader'\]; saved are: 'picky', 'scheduler'"):
        parallel_core.load_checkpoint(tmp_path / "a", run.model, objects={"loader": scheduler})


def test_random_states_come_back_on_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.random()), torch.rand(1).item()]

    def work() -> bool:
        model = nn.Linear(2, 2)
        for _ in range(collective.rank() + 1):
            drawn()
        parallel_core.save_checkpoint(tmp_path / "a", model, random_state=True)
        expected = drawn()
        parallel_core.load_checkpoint(tmp_path / "a", model)
        moved_on = drawn() != expected
        parallel_core.load_checkpoint(tmp_path / "a", model, random_state=True)
        return moved_on and drawn() == expected

    assert ranks(work) == [True, True]
    with pytest.raises(CheckpointError, match="has the random states of 2 ranks, and 1 are loading"):
        parallel_core.load_checkpoint(tmp_path / "a", nn.Linear(2, 2), random_state=True)
    parallel_core.save_checkpoint(tmp_path / "b", nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="was saved without random states; load with random_state=False"):
        parallel_core.load_checkpoint(tmp_path / "b", nn.Linear(2, 2), random_state=True)


def test_weights_from_elsewhere_load(ranks: Ranks, tmp_path: Path) -> None:
    """A safetensors file, a folder with one, a folder with an index; each rank reads its part."""
    expected = Run("language_model", None, seed=3).full()
    tensors = {name: value.clone() for name, value in expected.items()}
    (tmp_path / "folder").mkdir()
    save_file(tensors, tmp_path / "folder" / "model.safetensors")
    (tmp_path / "many").mkdir()
    parallel_core.save_checkpoint(
        tmp_path / "saved", Run("language_model", None, seed=3).model, state_dict_type="full", max_file_bytes=500
    )
    for path in (tmp_path / "saved").glob("model*"):
        path.rename(tmp_path / "many" / path.name)

    def work() -> list[str]:
        found = []
        for strategy, config in CONFIGS.items():
            for place in ("folder", "folder/model.safetensors", "many"):
                run = Run("language_model", config)
                assert parallel_core.load_checkpoint(tmp_path / place, run.model).extra is None
                found += differences(
                    run.full(),
                    expected if collective.rank() == 0 else {},
                    where=f"{strategy} {place}",
                )
        return found

    assert ranks(work) == [[], []]


def test_weights_from_elsewhere_that_don_t_fit_are_told(tmp_path: Path) -> None:
    run = Run("language_model", None)
    before, found = run.full(), {name: value.clone() for name, value in run.full().items()}
    tied = next(name for name in found if name != "head.weight" and torch.equal(found[name], found["head.weight"]))

    misfit = f"the checkpoint {tmp_path / 'a.safetensors'} does not fit the model"

    def message(tensors: dict[str, torch.Tensor], **options: Any) -> str:
        save_file(tensors, tmp_path / "a.safetensors")
        with pytest.raises(CheckpointError) as caught:
            parallel_core.load_checkpoint(tmp_path / "a.safetensors", run.model, **options)
        assert differences(run.full(), before) == []
        return str(caught.value)

    assert message({**found, "ghost": torch.ones(1)}) == (f"{misfit}: unexpected keys: 'ghost'")
    assert message({**found, "head.weight": found["head.weight"] + 1}) == (
        f"{misfit}: {tied!r} and 'head.weight' are one parameter of the model and have "
        f"different values in the checkpoint"
    )
    name, value = next((name, value) for name, value in found.items() if name not in (tied, "head.weight"))
    assert message({**found, name: value[:1]}).startswith(
        f"{misfit}: {name!r}: wrong shape: the model has float32{list(value.shape)}, the"
    )
    without = {key: each for key, each in found.items() if key != name}
    assert message(without) == f"{misfit}: missing keys: {name!r}"
    assert (
        message(found, optimizer=run.optimizer)
        == f"the checkpoint {tmp_path / 'a.safetensors'} has no state of an optimizer; load the model alone"
    )
    save_file({**without, "ghost": torch.ones(1)}, tmp_path / "a.safetensors")
    loaded = parallel_core.load_checkpoint(tmp_path / "a.safetensors", run.model, strict=False)
    assert loaded == parallel_core.LoadedCheckpoint(None, [name], ["ghost"])


class Whole:
    """A strategy that keeps state in its own way, and so answers the state-dict hooks, and not `local_shards`."""

    @hookimpl
    def strategy_config(self) -> type[parallel_core.StrategyConfig]:
        return parallel_core.StrategyConfig

    @hookimpl
    def wrap_model(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(model)

    @hookimpl
    def model_state_dict(self, model: nn.Module, state_dict_type: str) -> dict[str, Any]:
        values = {name.partition(".")[2]: value.detach() * 2 for name, value in model.state_dict().items()}
        return {} if state_dict_type == "full" and collective.rank() else values

    @hookimpl
    def load_model_state_dict(self, model: nn.Module, state_dict: dict[str, Any], state_dict_type: str) -> None:
        load_model_state_dict(model, state_dict, state_dict_type)  # type: ignore[arg-type]  # a StrEnum
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.div_(2)

    @hookimpl
    def load_optimizer_state_dict(self, model: Any, optimizer: Any, state_dict: Any, state_dict_type: Any) -> None:
        load_optimizer_state_dict(model, optimizer, state_dict, state_dict_type)


def test_a_strategy_with_its_own_state_dict_hooks_is_saved_through_them(ranks: Ranks, tmp_path: Path) -> None:
    """What its hook returns is on the disk, and what is on the disk goes through its hook."""

    def wrap(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        bare = CASES["blocks"].build(seed)
        entry_point = importlib.metadata.EntryPoint("whole", "tests", "parallel_core.strategies")
        strategy = Strategy(Registration("whole", "parallel-core-whole", "1", entry_point), Whole())
        wrapped = strategy.wrap_model(bare, strategy.config_class(), torch.device("cpu"))
        attach(Record(strategy, DistributedConfig(), Layout.of(bare)), wrapped, bare)
        return wrapped, torch.optim.AdamW(wrapped.parameters())

    def work(kind: str) -> list[str]:
        (model, optimizer), (other, other_optimizer) = wrap(1), wrap(2)
        inputs, targets = CASES["blocks"].batch(0, 4)
        CASES["blocks"].loss(model(inputs), targets).backward()
        optimizer.step()
        parallel_core.save_checkpoint(tmp_path / kind, model, optimizer, state_dict_type=kind)
        parallel_core.load_checkpoint(tmp_path / kind, other, other_optimizer)
        bare = CASES["blocks"].build(3)
        parallel_core.load_checkpoint(tmp_path / kind, bare)
        return [
            *differences(other.state_dict(), model.state_dict()),
            *differences(
                bare.state_dict(), {key.partition(".")[2]: value * 2 for key, value in model.state_dict().items()}
            ),
            *differences(
                parallel_core.optimizer_state_dict(other, other_optimizer),
                parallel_core.optimizer_state_dict(model, optimizer),
            ),
        ]

    for kind in KINDS:
        assert ranks(work, kind) == [[], []]


def test_where_ranks_differ_rank_0_is_what_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    """Buffers that each rank computes for itself: never a mixture, whoever writes the rest."""

    def work() -> list[str]:
        found = []
        for strategy in ("ddp", "fsdp", "fsdp2"):
            model = wrapped(nn.Sequential(nn.Linear(8, 8), *(nn.BatchNorm1d(8) for _ in range(4))), strategy)
            model(torch.randn(4, 8) + collective.rank())
            expected = parallel_core.model_state_dict(model)
            for kind in KINDS:
                parallel_core.save_checkpoint(tmp_path / kind, model, state_dict_type=kind)
                parallel_core.load_checkpoint(tmp_path / kind, model)
                found += differences(parallel_core.model_state_dict(model), expected, where=f"{strategy} {kind}")
                found += collective.differing_tensors(dict(model.named_buffers()))
        return found

    assert ranks(work) == [[], []]
