"""A load that can't be done is refused before anything changes; one that fails late says what has changed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import parallel_core
from parallel_core import DistributedConfig, ParallelCoreError, latest_checkpoint, load_checkpoint, save_checkpoint
from parallel_core import ranks as collective
from parallel_core.cli import main
from parallel_core.errors import CheckpointError
from parallel_core.tensors import is_dtensor
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import Run, differences

DDP = DistributedConfig(parallel_strategy="ddp")
FSDP2 = DistributedConfig(parallel_strategy="fsdp2", fsdp2_mixed_precision="fp32", fsdp2_auto_wrap_min_params=0)


class Obj:
    """An object whose state is one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


class Refusing(Obj):
    """Takes no state, not even its own."""

    def load_state_dict(self, value: Any) -> None:
        raise ValueError("never")


class Counting(nn.Linear):
    """A module with an extra state, which it does not take where `takes` is false."""

    takes = True

    def get_extra_state(self) -> Any:
        return {"seen": 3}

    def set_extra_state(self, state: Any) -> None:
        if not self.takes:
            raise ValueError("no")


def trained(seed: int, dtype: torch.dtype = torch.float32, steps: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(2, 2, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(1, 2, dtype=dtype)).sum().backward()
        optimizer.step()
    return model, optimizer


def fixed(model: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def message_of(call: Callable[[], Any]) -> str:
    """Return the error of the package that a call raises."""
    with pytest.raises(ParallelCoreError) as caught:
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def refused_hook(*_: Any) -> None:
    raise ValueError("hook")


def test_each_rank_is_told_of_what_fails_on_one(ranks: Ranks, tmp_path: Path) -> None:
    """Whatever a script does on one rank alone, the next call works."""

    def work() -> list[str]:
        is_first = collective.rank() == 0
        place = tmp_path / "a"
        run = Run("blocks", DDP)
        run.step(0)
        save_checkpoint(place, run.model, run.optimizer, objects={"thing": Obj(1), "other": Obj(2)})
        other = Run("blocks", DDP, seed=5)
        before = other.full()
        inside = other.model.module if isinstance(other.model.module, nn.Module) else other.model
        thing, refusing = Obj(7), Refusing(8)
        hooked = Run("blocks", DDP, seed=5)
        if not is_first:
            assert hooked.optimizer is not None
            hooked.optimizer.register_load_state_dict_pre_hook(refused_hook)
        calls: tuple[Callable[[], Any], ...] = (
            lambda: load_checkpoint(place, other.model, verify=is_first),
            lambda: load_checkpoint(place, other.model, objects={} if is_first else {"thing": thing}),
            lambda: load_checkpoint(place, other.model, objects={"thing": thing, "other": thing if is_first else 5}),
            lambda: load_checkpoint(
                place, other.model, objects={"other": thing, "thing": thing if is_first else refusing}
            ),
            lambda: load_checkpoint(place, other.model if is_first else inside),
            lambda: load_checkpoint(place, other.model if is_first else None),  # type: ignore[arg-type]  # meant
            lambda: load_checkpoint(place, other.model if is_first else nn.LazyLinear(2)),
            lambda: load_checkpoint(place, other.model if is_first else Run("blocks", None).model),
            lambda: load_checkpoint(place, hooked.model, hooked.optimizer, objects={"thing": thing}),
        )
        found = [message_of(call) for call in calls]
        assert thing.value == 7
        assert differences(other.full(), before) == []
        assert differences(hooked.full(), before) == []
        assert hooked.optimizer is not None
        assert not hooked.optimizer.state
        load_checkpoint(place, other.model, other.optimizer, objects={"thing": thing})
        assert differences(other.full(), run.full()) == []
        assert thing.value == 1
        return found

    first, second = ranks(work)
    assert first == second
    for text, expected in zip(
        first,
        (
            "every rank must load in the same way: verify is True on rank 0 and False on rank 1",
            "every rank must load in the same way: objects is [] on rank 0 and ['thing'] on rank 1",
            "rank 1 of 2: objects['other'] has no state_dict(): found int",
            "rank 1 of 2: objects['thing'] (Refusing) does not take the state that was saved: ValueError: never",
            "is the module inside a wrapped model",
            "rank 1 of 2: model: expected a torch.nn.Module, found NoneType",
            "uninitialized parameter",
            "every rank must load in the same way: strategy is 'ddp' on rank 0 and 'bare' on rank 1",
            "rank 1 of 2: the optimizer (AdamW) does not take the state that was saved: ValueError: hook",
        ),
        strict=True,
    ):
        assert expected in text


def test_an_object_with_sharded_tensors_gets_its_part_of_them(ranks: Ranks, tmp_path: Path) -> None:
    """An averaged model that fsdp2 has wrapped: no rank ever holds it whole."""

    class Average(Obj):
        def state_dict(self) -> Any:
            return {"steps": 4, "model": [self.value.state_dict()]}

        def load_state_dict(self, value: Any) -> None:
            (state,) = value["model"]
            own = self.value.state_dict()
            assert {name: is_dtensor(each) for name, each in state.items()} == {
                name: is_dtensor(own[name]) for name in own
            }
            assert all(is_dtensor(state[name]) for name, _ in self.value.named_parameters())
            self.value.load_state_dict(state)

    def work() -> list[str]:
        run, average, other = (Run("blocks", FSDP2, seed=seed) for seed in (1, 2, 3))
        save_checkpoint(tmp_path / "a", run.model, objects={"average": Average(average.model), "plain": average.model})
        load_checkpoint(tmp_path / "a", run.model, objects={"average": Average(other.model)})
        found = differences(other.full(), average.full())
        other = Run("blocks", FSDP2, seed=3)
        load_checkpoint(tmp_path / "a", run.model, objects={"plain": other.model})
        return found + differences(other.full(), average.full())

    assert ranks(work) == [[], []]
    # In one process there are no shards.
    bare, expected = Run("blocks", None).model, Run("blocks", None, seed=2).model
    load_checkpoint(tmp_path / "a", Run("blocks", None).model, objects={"plain": bare})
    assert differences(bare.state_dict(), expected.state_dict()) == []


@pytest.mark.parametrize("state", [0, False, [], "", None, (), torch.tensor([1.0, 2.0]), torch.zeros(())])
def test_any_state_of_an_object_comes_back(tmp_path: Path, state: Any) -> None:
    save_checkpoint(tmp_path / "a", nn.Linear(2, 2), objects={"thing": Obj(state)})
    load_checkpoint(tmp_path / "a", nn.Linear(2, 2), objects={"thing": (thing := Obj("another"))})
    assert repr(thing.value) == repr(state)


def test_an_object_that_takes_nothing_does_not_hide_the_first_error(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", model := nn.Linear(2, 2), objects={"a": Obj(1), "b": Obj(2), "c": Obj(3)})
    first, last = Obj(5), Obj(6)
    text = message_of(lambda: load_checkpoint(tmp_path / "a", model, objects={"a": first, "b": Refusing(0), "c": last}))
    assert text == (
        "CheckpointError: objects['b'] (Refusing) does not take the state that was saved: ValueError: never"
    )
    assert (first.value, last.value) == (5, 6)


def test_an_optimizer_that_does_not_take_its_state_leaves_all_as_it_was(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", *trained(1), objects={"thing": Obj(1)})
    (model, optimizer), thing = trained(2), Obj(2)
    weights, state = {k: v.clone() for k, v in model.state_dict().items()}, optimizer.state_dict()
    handle = optimizer.register_load_state_dict_post_hook(refused_hook)
    text = message_of(lambda: load_checkpoint(tmp_path / "a", model, optimizer, objects={"thing": thing}))
    assert text == ("CheckpointError: the optimizer (AdamW) does not take the state that was saved: ValueError: hook")
    assert differences(model.state_dict(), weights) == []
    assert str(optimizer.state_dict()) == str(state)
    assert thing.value == 2
    handle.remove()
    load_checkpoint(tmp_path / "a", model, optimizer)
    assert str(optimizer.state_dict()) == str(trained(1)[1].state_dict())


def test_an_extra_state_that_is_not_taken_is_told_with_what_has_changed(tmp_path: Path) -> None:
    model = Counting(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    save_checkpoint(tmp_path / "a", model, optimizer, objects={"thing": Obj(1)})
    other, thing = Counting(2, 2), Obj(2)
    other.takes = False
    own = torch.optim.SGD(other.parameters(), lr=0.1)
    assert message_of(lambda: load_checkpoint(tmp_path / "a", other, own, objects={"thing": thing})) == (
        "CheckpointError: '_extra_state': Counting does not take the extra state that was saved: ValueError: no; the "
        "model has the checkpoint's weights now"
    )
    assert torch.equal(other.weight, model.weight)
    assert own.param_groups[0]["lr"] == 0.1
    assert thing.value == 2


def test_random_states_that_are_none_are_refused_before_anything_changes(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", model := nn.Linear(2, 2), random_state=True, checksum=False)
    file = tmp_path / "a" / "random-states.json"
    size = file.stat().st_size
    other = nn.Linear(2, 2)
    before, drawn = other.weight.clone(), (random.getstate(), torch.get_rng_state())
    for text in ('[{"python":{"$tuple":[3,{"$tuple":[1]},null]}}]', "[5]", "[" * size):
        file.write_text(text.ljust(size))
        with pytest.raises(CheckpointError, match=str(file)):
            load_checkpoint(tmp_path / "a", other, random_state=True)
    assert torch.equal(other.weight, before)
    assert random.getstate() == drawn[0]
    assert torch.equal(torch.get_rng_state(), drawn[1])
    load_checkpoint(tmp_path / "a", other)
    assert torch.equal(other.weight, model.weight)


def test_a_bare_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", model := nn.Linear(2, 2))
    with torch.device("meta"):
        other = nn.Linear(2, 2)
    assert message_of(lambda: load_checkpoint(tmp_path / "a", other)) == (
        "CheckpointError: on the meta device: 'weight', 'bias'; give the model memory first "
        "(model.to_empty(device=...)), or wrap it, with state_dict=..."
    )
    load_checkpoint(tmp_path / "a", other.to_empty(device="cpu"))
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [("complex64", "float32"), ("float32", "complex64"), ("float32", "int64"), ("int64", "float32"), ("int64", "int32"),
     ("bool", "uint8")],
)  # fmt: skip
def test_cast_is_between_dtypes_of_one_kind(tmp_path: Path, saved: str, wanted: str) -> None:
    model, other = nn.Module(), nn.Module()
    model.register_buffer("a", torch.ones(2, dtype=getattr(torch, saved)))
    other.register_buffer("a", torch.zeros(2, dtype=getattr(torch, wanted)))
    save_checkpoint(tmp_path / "a", model)
    assert message_of(lambda: load_checkpoint(tmp_path / "a", other, cast=True)) == (
        f"CheckpointError: the checkpoint {tmp_path / 'a'} does not fit the model: 'a': wrong dtype: the model has "
        f"{wanted}[2], the checkpoint {saved}[2]"
    )
    assert not other.get_buffer("a").any()


@pytest.mark.parametrize(
    ("saved", "value", "wanted"),
    [("float32", 1e6, "float16"), ("float64", 1e300, "bfloat16"), ("float32", 1e6, "float8_e4m3fnuz"),
     ("complex128", complex(1, 1e300), "complex64")],
)  # fmt: skip
def test_a_number_that_the_models_dtype_has_no_room_for_is_refused(
    tmp_path: Path, saved: str, value: Any, wanted: str
) -> None:
    def made(dtype: str, values: list[Any]) -> nn.Module:
        model = nn.Module()
        model.register_buffer("a", torch.tensor(values, dtype=getattr(torch, saved)).to(getattr(torch, dtype)))
        return model

    save_checkpoint(tmp_path / "a", made(saved, [1, value]))
    text = message_of(lambda: load_checkpoint(tmp_path / "a", made(wanted, [0, 0]), cast=True))
    assert "CheckpointError: 'a' has " in text
    assert "; choose another dtype; the model has some of the checkpoint's values now" in text
    save_checkpoint(tmp_path / "b", made(saved, [1, float("nan")]))
    load_checkpoint(tmp_path / "b", model := made(wanted, [0, 0]), cast=True)
    assert model.get_buffer("a").to(torch.complex64).isnan().tolist() == [False, True]


def test_training_goes_on_in_another_dtype(ranks: Ranks, tmp_path: Path) -> None:
    """What had the dtype of the saved weights is converted with them; a step count never is."""

    def work() -> list[str]:
        found = []
        for strategy, config in {"bare": None, "fsdp2": FSDP2}.items():
            models = []
            for dtype in (torch.float32, torch.bfloat16):
                bare = nn.Linear(2, 2, dtype=dtype)
                model = bare if config is None else parallel_core.wrap_model_for_training(bare, config) or bare
                models.append((model, torch.optim.AdamW(model.parameters())))
            (model, optimizer), (other, loaded) = models
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            save_checkpoint(tmp_path / strategy, model, optimizer)
            load_checkpoint(tmp_path / strategy, other, loaded, cast=True)
            state = loaded.state_dict()["state"][0]
            found.append(", ".join(f"{key}: {state[key].dtype}" for key in sorted(state)))
            other(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
            loaded.step()
        return found

    expected = "exp_avg: torch.bfloat16, exp_avg_sq: torch.bfloat16, step: torch.float32"
    assert ranks(work) == [[expected] * 2] * 2


class Odd(nn.Module):
    """Parameters under names that begin with `$`, and a part whose extra state lies under such a name."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_parameter("$tensor", nn.Parameter(torch.full((2,), value)))
        self.add_module("$m", fixed(Counting(2, 2), value))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.get_submodule("$m")(inputs * self.get_parameter("$tensor"))
        return outputs


class Lone(nn.Module):
    """One parameter, so that a dict by its name has one key."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.register_parameter("$w", nn.Parameter(torch.full((2,), value)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.get_parameter("$w")


@pytest.mark.parametrize("kind", [Odd, Lone])
def test_names_that_begin_with_a_dollar_come_back(tmp_path: Path, kind: Callable[[float], nn.Module]) -> None:
    place, model, other = tmp_path / "a", kind(1.0), kind(2.0)
    optimizer, own = (torch.optim.AdamW(each.parameters()) for each in (model, other))
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save_checkpoint(place, model, optimizer, objects={"$tensor": Obj({"$x": 1})}, extra={"$tensor": 3})
    thing = Obj(None)
    assert load_checkpoint(place, other, own, objects={"$tensor": thing}).extra == {"$tensor": 3}
    assert thing.value == {"$x": 1}
    assert differences(
        {name: value for name, value in other.state_dict().items() if isinstance(value, torch.Tensor)},
        {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)},
    ) == []  # fmt: skip
    assert str(own.state_dict()) == str(optimizer.state_dict())
    assert main(["checkpoint", "inspect", str(place), "--all"]) == 0
    assert main(["checkpoint", "consolidate", str(place), str(tmp_path / "full")]) == 0
    assert main(["checkpoint", "diff", str(place), str(tmp_path / "full")]) == 0


def test_state_and_options_that_no_such_optimizer_has_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained(1)
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(3, 3)  # type: ignore[index]  # a parameter
    optimizer.param_groups[0]["eps"] = "small"
    save_checkpoint(tmp_path / "a", model, optimizer)
    assert message_of(lambda: load_checkpoint(tmp_path / "a", *trained(2))) == (
        f"CheckpointError: the checkpoint {tmp_path / 'a'} does not fit the optimizer:\n"
        "  - group 0, 'eps': expected a number, found 'small'\n"
        "  - 'weight', 'exp_avg': wrong shape: the model's parameter is float32[2, 2], the state float32[3, 3]"
    )


def test_what_a_file_from_elsewhere_notes_of_itself_is_no_name(tmp_path: Path) -> None:
    """Only a name that has no tensor, and stands for one that is there, is one of a tied tensor."""
    model = nn.Module()
    for name in ("pt", "a", "b"):
        model.register_parameter(name, nn.Parameter(torch.zeros(1)))
    tensors = {name: torch.full((1,), float(index)) for index, name in enumerate(("pt", "a", "b"))}
    save_file(tensors, file := tmp_path / "a.safetensors", {"format": "pt", "a": "b", "note": "nothing"})
    loaded = load_checkpoint(file, model)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])
    assert [parameter.item() for parameter in model.parameters()] == [0.0, 1.0, 2.0]


def test_a_counter_of_odd_numbers_comes_back(tmp_path: Path) -> None:
    counter: Any = Counter({"a": float("inf"), "b": (1, 2)})
    save_checkpoint(tmp_path / "a", model := nn.Linear(2, 2), extra=counter)
    assert load_checkpoint(tmp_path / "a", model).extra == counter
    assert "$counter" in json.loads((tmp_path / "a" / "manifest.json").read_text())["extra"]


def test_none_is_told_as_what_latest_checkpoint_returns(tmp_path: Path) -> None:
    path: Any = latest_checkpoint(tmp_path)
    assert message_of(lambda: load_checkpoint(path, nn.Linear(2, 2))) == (
        "CheckpointError: path: expected the name of a folder, found None, which latest_checkpoint returns where there "
        "is no checkpoint yet; start from the beginning then"
    )


@pytest.mark.parametrize("path", ["", "nul\0", 3])
def test_what_can_t_be_a_path_is_named(path: Any) -> None:
    assert message_of(lambda: load_checkpoint(path, nn.Linear(2, 2))) == (
        f"CheckpointError: path: expected the name of a folder, found {path!r}"
    )


def test_a_folder_of_checkpoints_says_which_it_holds(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path / f"step-{step}", nn.Linear(2, 2))
    assert message_of(lambda: load_checkpoint(tmp_path, nn.Linear(2, 2))).endswith(
        "no .safetensors file; it is a folder of checkpoints, name one of them, such as step-2"
    )
