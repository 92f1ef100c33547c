"""An optimizer's state by parameter names, in place of the positions that torch uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_core import StateDictError, load_optimizer_state_dict, optimizer_state_dict
from parallel_core.optimizer_state import load_named_state, named_groups
from parallel_core.outputs import tensors_in

Make = Callable[[nn.Module], torch.optim.Optimizer]


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def two_groups(model: nn.Module) -> torch.optim.AdamW:
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.5}], lr=0.01)


OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1),
    "AdamW, amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True),
    "AdamW, fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, fused=True),
    "AdamW, the rate a tensor": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1)),
    "AdamW, two groups": two_groups,
    "AdamW, named parameters": lambda model: torch.optim.AdamW(model.named_parameters(), lr=0.1),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "SGD, momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.5, centered=True),
}

each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(make: Make, steps: int = 2) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = model_of()
    optimizer = make(model)
    for seed in range(steps):
        step(model, optimizer, seed)
    return model, optimizer


def flat(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}
        for entries in optimizer.state.values()
    ]


def test_state_and_groups_stand_under_the_parameters_names() -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW, two groups"])
    state = optimizer_state_dict(model, optimizer)
    assert list(state) == ["state", "param_groups"]
    assert list(state["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert state["state"]["0.weight"]["exp_avg"].equal(optimizer.state[next(model.parameters())]["exp_avg"])
    assert [group["params"] for group in state["param_groups"]] == [["0.weight", "1.weight"], ["0.bias", "1.bias"]]
    assert [group["weight_decay"] for group in state["param_groups"]] == [0.1, 0.01]
    assert [group["lr"] for group in state["param_groups"]] == [0.01, 0.5]


class Odd(torch.optim.SGD):
    """Keeps what torch itself would cast or take apart when it is loaded."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "mode": "warm",
                "history": [torch.tensor([1.001]), torch.tensor([16777217]), "text"],
                "masks": {"mask": torch.tensor([True]), "deep": (torch.tensor([2.0], dtype=torch.float64),)},
                "step": 3,
            }


def test_state_in_lists_dicts_and_texts_comes_back_as_it_was() -> None:
    model = model_of().to(torch.bfloat16)
    optimizer = Odd(model.parameters())
    optimizer.step()
    saved = optimizer_state_dict(model, optimizer)
    other = Odd(model.parameters())
    load_optimizer_state_dict(model, other, saved)
    for parameter in model.parameters():
        expected, found = optimizer.state[parameter], other.state[parameter]
        assert str(sorted(found.items())) == str(sorted(expected.items()))
        assert [each.dtype for each in tensors_in(found)] == [each.dtype for each in tensors_in(expected)]
    other.state[model.get_parameter("1.bias")]["history"][0].zero_()
    assert saved["state"]["1.bias"]["history"][0].item() == pytest.approx(1.001)


class Shampoo(torch.optim.SGD):
    """Keeps matrices of the sizes of a parameter's dimensions, and options that may be anything."""

    def __init__(self, parameters: Any, clip: float | None = None, milestones: tuple[int, ...] = ()) -> None:
        super().__init__(parameters)
        self.defaults |= {"clip": clip, "milestones": milestones}
        for group in self.param_groups:
            group |= {"clip": clip, "milestones": milestones}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # returns nothing
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                f"pre{dimension}": torch.full((size, size), 2.0) for dimension, size in enumerate(parameter.shape)
            }


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_of_an_optimizer_of_ones_own_whatever_was_saved_is_loaded(kind: str) -> None:
    model = model_of()
    optimizer = Shampoo(model.parameters(), None, (1, 2, 3))
    optimizer.step()
    other = Shampoo(model.parameters(), 1.0, (5,))
    load_optimizer_state_dict(model, other, optimizer_state_dict(model, optimizer, kind), kind)
    assert str(other.state_dict()) == str(optimizer.state_dict())


def test_an_adafactor_with_other_settings_takes_what_was_saved() -> None:
    model, optimizer = trained(lambda found: torch.optim.Adafactor(found.parameters()))
    other = torch.optim.Adafactor(model.parameters(), eps=(1e-30, 1e-3))
    load_optimizer_state_dict(model, other, optimizer_state_dict(model, optimizer))
    assert other.param_groups[0]["eps"] == (None, 1e-3)


def test_the_names_that_the_optimizer_was_given_are_left_out() -> None:
    """They are those of the wrapped model."""
    model, optimizer = trained(OPTIMIZERS["AdamW, named parameters"])
    [group] = optimizer_state_dict(model, optimizer)["param_groups"]
    assert "param_names" in optimizer.param_groups[0]
    assert "param_names" not in group


def test_a_tied_parameter_stands_under_the_first_of_its_names() -> None:
    model = model_of()
    model.append(nn.Linear(3, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]  # sum's start is 0
    optimizer.step()
    state = optimizer_state_dict(model, optimizer)
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "2.bias"]
    assert list(state["state"]) == names
    assert state["param_groups"][0]["params"] == names


@each_optimizer
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_training_goes_on_after_a_round_trip_as_if_there_had_been_none(make: Make, kind: str) -> None:
    model, optimizer = trained(make)
    other = model_of(seed=9)
    other.load_state_dict(model.state_dict())
    restored = make(other)
    load_optimizer_state_dict(other, restored, optimizer_state_dict(model, optimizer, kind), kind)
    for seed in range(3):
        step(model, optimizer, seed)
        step(other, restored, seed)
    for expected, found in zip(model.parameters(), other.parameters(), strict=True):
        assert found.equal(expected)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_the_momentum_of_sparse_gradients_is_saved_dense(kind: str) -> None:
    def started() -> tuple[nn.Embedding, torch.optim.SGD]:
        model = nn.Embedding(4, 2, sparse=True, _weight=torch.ones(4, 2))
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)

    def train(model: nn.Embedding, optimizer: torch.optim.SGD) -> Tensor:
        optimizer.zero_grad()
        model(torch.tensor([1, 1, 2])).sum().backward()
        optimizer.step()
        return model.weight.detach().clone()

    model, optimizer = started()
    train(model, optimizer)
    state = optimizer_state_dict(model, optimizer, kind)
    assert torch.equal(
        state["state"]["weight"]["momentum_buffer"], torch.tensor([[0.0] * 2, [2.0] * 2, [1.0] * 2, [0.0] * 2])
    )
    other, restored = started()
    other.load_state_dict(model.state_dict())
    load_optimizer_state_dict(other, restored, state, kind)
    assert torch.equal(train(other, restored), train(model, optimizer))


@each_optimizer
@pytest.mark.parametrize("steps", [0, 1])
def test_reading_changes_nothing_before_the_first_step_as_well(make: Make, steps: int) -> None:
    looked_at, left_alone = trained(make, steps), trained(make, steps)
    for kind in ("full", "sharded"):
        optimizer_state_dict(*looked_at, kind)
    assert len(looked_at[1].state) == len(left_alone[1].state)
    for seed in range(2):
        step(*looked_at, seed)
        step(*left_alone, seed)
    for expected, found in zip(left_alone[0].parameters(), looked_at[0].parameters(), strict=True):
        assert found.equal(expected)


def test_reading_leaves_gradients_and_hooks_alone() -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    model(torch.ones(1, 3)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *arguments: calls.append("step"))
    optimizer_state_dict(model, optimizer)
    assert all(before is parameter.grad for before, parameter in zip(gradients, model.parameters(), strict=True))
    assert calls == []


def test_state_that_was_not_made_yet_is_not_in_the_dict() -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"], steps=0)
    state = optimizer_state_dict(model, optimizer)
    assert state["state"] == {}
    assert len(optimizer.state) == 0
    used, restored = trained(OPTIMIZERS["AdamW"])
    load_optimizer_state_dict(used, restored, state)
    assert len(restored.state) == 0, "state that is not in the dict is gone after loading"


def test_the_state_of_parameters_that_were_frozen_since_comes_back_and_none_is_made_up() -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    model[0].requires_grad_(False)
    state = optimizer_state_dict(model, optimizer)
    assert len(state["state"]) == 4
    fresh = torch.optim.AdamW(model.parameters())
    load_optimizer_state_dict(model, fresh, state)
    assert len(fresh.state) == 4
    unused = model_of()
    half = torch.optim.AdamW(unused.parameters())
    unused[1](torch.ones(1, 4)).sum().backward()
    half.step()
    assert list(optimizer_state_dict(unused, half)["state"]) == ["1.weight", "1.bias"]


def test_an_optimizer_of_a_part_of_the_model_is_taken() -> None:
    model = model_of()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer, 0)
    state = optimizer_state_dict(model, optimizer)
    assert list(state["state"]) == ["1.weight", "1.bias"]
    fresh = torch.optim.SGD(model[1].parameters(), lr=0.2)
    fresh.param_groups[0]["momentum"] = 0.1
    load_optimizer_state_dict(model, fresh, state)
    assert (fresh.param_groups[0]["lr"], fresh.param_groups[0]["momentum"]) == (0.1, 0.9)


def test_a_full_state_dict_is_a_snapshot() -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW, the rate a tensor"])
    state = optimizer_state_dict(model, optimizer)
    before = copy.deepcopy(state)
    step(model, optimizer, 5)
    optimizer.param_groups[0]["lr"].fill_(7.0)
    assert str(state) == str(before)


def test_loading_leaves_the_dict_as_it_was_and_shares_no_memory_with_it() -> None:
    for kind in ("full", "sharded"):
        model, optimizer = trained(OPTIMIZERS["SGD, momentum"])
        state = optimizer_state_dict(model, optimizer)
        before = copy.deepcopy(state)
        load_optimizer_state_dict(model, optimizer, state, kind)
        step(model, optimizer, 5)
        assert str(state) == str(before)


def test_the_step_count_goes_where_the_optimizer_wants_it() -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    load_optimizer_state_dict(model, optimizer, optimizer_state_dict(model, optimizer))
    for entries in optimizer.state.values():
        assert entries["step"].item() == 2.0
        assert entries["step"].dtype is torch.float32


def test_state_is_kept_in_the_parameters_dtype() -> None:
    model = model_of().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = optimizer_state_dict(model, optimizer)
    assert {entries["momentum_buffer"].dtype for entries in state["state"].values()} == {torch.bfloat16}
    load_optimizer_state_dict(model, optimizer, state)
    assert {entries["momentum_buffer"].dtype for entries in optimizer.state.values()} == {torch.bfloat16}


def test_options_are_replaced_and_those_of_a_scheduler_come_along() -> None:
    model, optimizer = trained(OPTIMIZERS["SGD"])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = optimizer_state_dict(model, optimizer)
    assert state["param_groups"][0]["initial_lr"] == 0.1
    fresh = torch.optim.SGD(model.parameters(), lr=5.0)
    load_optimizer_state_dict(model, fresh, state)
    assert fresh.param_groups[0]["lr"] == 0.1
    assert fresh.param_groups[0]["initial_lr"] == 0.1


def test_the_load_hooks_of_the_optimizer_run() -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    calls: list[str] = []
    optimizer.register_load_state_dict_post_hook(lambda *arguments: calls.append("loaded"))
    load_optimizer_state_dict(model, optimizer, optimizer_state_dict(model, optimizer))
    assert calls == ["loaded"]


def test_an_optimizer_that_was_given_names_keeps_them() -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW, named parameters"])
    names = optimizer.param_groups[0]["param_names"]
    load_optimizer_state_dict(model, optimizer, optimizer_state_dict(model, optimizer))
    assert optimizer.param_groups[0]["param_names"] == names


def test_the_state_of_named_parameters_loads_into_plain_ones_and_back() -> None:
    named, plain = trained(OPTIMIZERS["AdamW, named parameters"]), trained(OPTIMIZERS["AdamW"])
    expected = optimizer_state_dict(*named)["state"]
    load_optimizer_state_dict(*plain, optimizer_state_dict(*named))
    load_optimizer_state_dict(*named, optimizer_state_dict(*plain))
    found = optimizer_state_dict(*named)["state"]
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert all(torch.equal(found[name][key], value) for key, value in values.items()), name


@pytest.mark.parametrize(
    "verb", [optimizer_state_dict, lambda model, optimizer: load_optimizer_state_dict(model, optimizer, {})]
)
def test_the_optimizer_of_another_model_is_refused(verb: Callable[..., Any]) -> None:
    with pytest.raises(StateDictError) as caught:
        verb(model_of(), torch.optim.SGD(model_of().parameters()))
    assert str(caught.value) == (
        "the optimizer holds 4 parameters that are not the model's (the first has the shape [4, 3]); make the "
        "optimizer from the parameters of the wrapped model"
    )


def test_named_groups_are_copies() -> None:
    model, optimizer = trained(OPTIMIZERS["AdamW"])
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]
    groups = named_groups(optimizer, dict(model.named_parameters()))
    groups[0]["betas"][0] = 0.0
    groups[0]["params"].clear()
    assert optimizer.param_groups[0]["betas"] == [0.9, 0.99]
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_named_state_is_put_back_by_name_whatever_the_order() -> None:
    model, optimizer = trained(OPTIMIZERS["SGD, momentum"])
    parameters = dict(model.named_parameters())
    groups = named_groups(optimizer, parameters)
    state = {name: dict(optimizer.state[parameter]) for name, parameter in reversed(parameters.items())}
    expected = flat(optimizer)
    optimizer.state.clear()
    load_named_state(optimizer, parameters, state, groups)
    for name, parameter in parameters.items():
        assert optimizer.state[parameter]["momentum_buffer"].equal(state[name]["momentum_buffer"])
    assert len(optimizer.state) == len(expected)
