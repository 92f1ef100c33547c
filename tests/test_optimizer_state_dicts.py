"""Whether an optimizer's state dict fits is found before any tensor moves, and agreed on by all ranks."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from parallel_core import StateDictError, load_optimizer_state_dict, optimizer_state_dict
from parallel_core import ranks as core
from parallel_core.testing import Ranks

PREFIX = "the state dict does not fit the optimizer; nothing was loaded:\n  - "


def trained(seed: int = 0) -> tuple[nn.Sequential, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    return model, optimizer


def saved(change: Callable[[dict[str, Any]], Any] = lambda state: None) -> dict[str, Any]:
    """Return a state dict that no rank has to be asked for."""
    model, optimizer = trained(1)
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    state = {
        "state": {names[parameter]: dict(entries) for parameter, entries in optimizer.state.items()},
        "param_groups": [
            {**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
        ],
    }
    change(state)
    return state


def values(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return {
        index: {key: value.clone() if isinstance(value, Tensor) else value for key, value in entries.items()}
        for index, entries in enumerate(optimizer.state.values())
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(core.bits(one).equal(core.bits(other)) if isinstance(one, Tensor) else one == other)


def failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except StateDictError as error:
        return str(error)
    return ""


def refused(state_dict: Any, kind: str = "full") -> str:
    model, optimizer = trained()
    before = values(optimizer)
    text = failure(lambda: load_optimizer_state_dict(model, optimizer, state_dict, kind))
    assert same(values(optimizer), before)
    return text.removeprefix(PREFIX)


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change: the last argument is put where the others lead."""
    *way, key, value = path

    def change(state: Any) -> None:
        for part in way:
            state = state[part]
        state[key] = value

    return change


def without_group(state: dict[str, Any]) -> None:
    state["param_groups"].append(dict(state["param_groups"][0], params=[]))


ANOTHER = "it is another optimizer's, or from a strategy that shows parameters in other shapes"

MISFITS: dict[str, tuple[Callable[[], Any], str]] = {
    "none": (lambda: None, "expected a dict with 'state' and 'param_groups', found NoneType"),
    "a list": (lambda: [1], "expected a dict with 'state' and 'param_groups', found list"),
    "another dict": (
        lambda: {"model": 1, "state": {}},
        "expected a dict with 'state' and 'param_groups', found dict with ['model', 'state']",
    ),
    "torch's own": (
        lambda: trained()[1].state_dict(),
        "parameters stand by their positions, as torch itself saves them; optimizer_state_dict saves their names",
    ),
    "torch's own before the first step": (
        lambda: torch.optim.AdamW(trained()[0].parameters()).state_dict(),
        "parameters stand by their positions, as torch itself saves them; optimizer_state_dict saves their names",
    ),
    "state of another kind": (
        lambda: saved(put("state", [1])),
        "'state': expected a dict of each parameter's values, found [1]",
    ),
    "values of another kind": (
        lambda: {**saved(), "state": {"0.weight": 3}},
        "'state': expected a dict of each parameter's values, found {'0.weight': 3}",
    ),
    "groups of another kind": (
        lambda: saved(put("param_groups", {})),
        "'param_groups': expected a list of dicts that have 'params', found {}",
    ),
    "a group without parameters": (
        lambda: saved(put("param_groups", [{"lr": 1}])),
        "'param_groups': expected a list of dicts that have 'params', found [{'lr': 1}]",
    ),
    "unknown parameters": (
        lambda: saved(put("state", "2.weight", {})),
        "state of parameters that the model lacks: '2.weight'",
    ),
    "another number of groups": (
        lambda: saved(without_group),
        "the optimizer has 1 parameter groups, the state dict 2; make the same groups",
    ),
    "a parameter too few": (
        lambda: saved(put("param_groups", 0, "params", ["0.weight", "0.bias", "1.weight"])),
        "group 0 of the state dict lacks parameters that the optimizer's has: '1.bias'",
    ),
    "a parameter too many": (
        lambda: saved(put("param_groups", 0, "params", ["0.weight", "0.bias", "1.weight", "1.bias", "x"])),
        "group 0 of the state dict has parameters that the optimizer's lacks: 'x'",
    ),
    "numbers of another kind": (
        lambda: saved(put("param_groups", 0, "betas", "ab")),
        "group 0, 'betas': expected 2 numbers, found 'ab'",
    ),
    "a number too few": (
        lambda: saved(put("param_groups", 0, "betas", (0.9,))),
        "group 0, 'betas': expected 2 numbers, found (0.9,)",
    ),
    "state that the next step would miss": (
        lambda: saved(lambda state: state["state"]["1.bias"].pop("exp_avg")),
        f"state without 'exp_avg', which AdamW keeps; {ANOTHER}: '1.bias'",
    ),
    "a text for a tensor": (
        lambda: saved(put("state", "1.bias", "exp_avg", "abc")),
        "'1.bias', 'exp_avg': expected a tensor like the parameter, float32[2], found 'abc'",
    ),
    "nothing for a tensor": (
        lambda: saved(put("state", "1.bias", "exp_avg", None)),
        "'1.bias', 'exp_avg': expected a tensor like the parameter, float32[2], found None",
    ),
    "integers": (
        lambda: saved(put("state", "1.bias", "exp_avg", torch.ones(2, dtype=torch.int64))),
        "'1.bias', 'exp_avg': expected a tensor like the parameter, float32[2], found int64[2]",
    ),
    "a count of several": (
        lambda: saved(put("state", "1.bias", "step", torch.ones(3))),
        "'1.bias', 'step': wrong shape: the model's parameter is float32[2], the state float32[3]",
    ),
    "a text for a count": (
        lambda: saved(put("state", "1.bias", "step", "x")),
        "'1.bias', 'step': expected a number, found 'x'",
    ),
    "no number": (
        lambda: saved(put("param_groups", 0, "lr", math.nan)),
        "group 0, 'lr': expected a number, found nan",
    ),
    "several numbers": (
        lambda: saved(put("param_groups", 0, "lr", torch.ones(2))),
        "group 0, 'lr': expected a number, found tensor([1., 1.])",
    ),
    "state that an option of the dict asks for": (
        lambda: saved(put("param_groups", 0, "amsgrad", True)),
        f"state without 'max_exp_avg_sq', which AdamW keeps; {ANOTHER}: '0.weight', '0.bias', '1.weight', '1.bias'",
    ),
    "another optimizer's options": (
        lambda: saved(lambda state: state["param_groups"][0].pop("betas")),
        "group 0 of the state dict lacks options; it is another kind of optimizer's: 'betas'",
    ),
    "a wrong shape": (
        lambda: saved(put("state", "0.bias", "exp_avg", torch.ones(9))),
        "'0.bias', 'exp_avg': wrong shape: the model's parameter is float32[4], the state float32[9]",
    ),
    "a sparse tensor": (
        lambda: saved(put("state", "0.bias", "exp_avg", torch.ones(4).to_sparse())),
        "'0.bias', 'exp_avg': found a sparse tensor; make it dense",
    ),
    "no values": (
        lambda: saved(put("state", "0.bias", "exp_avg", torch.ones(4, device="meta"))),
        "'0.bias', 'exp_avg': found a tensor on the meta device, which has no values",
    ),
}


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_and_nothing_is_loaded(misfit: str, kind: str) -> None:
    make, text = MISFITS[misfit]
    assert refused(make(), kind) == text


def test_all_problems_are_told_at_once() -> None:
    def change(state: dict[str, Any]) -> None:
        state["state"]["ghost"] = {}
        state["state"]["0.bias"]["exp_avg"] = torch.ones(9)
        state["param_groups"][0].pop("eps")

    assert refused(saved(change)) == (
        "state of parameters that the model lacks: 'ghost'\n"
        "  - group 0 of the state dict lacks options; it is another kind of optimizer's: 'eps'\n"
        "  - '0.bias', 'exp_avg': wrong shape: the model's parameter is float32[4], the state float32[9]"
    )


def test_a_dict_that_fails_when_it_is_read_is_refused() -> None:
    class Torn(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise OSError("read error")

    assert refused(Torn(saved())) == "OSError: read error"


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_what_an_older_torch_saved_is_loaded_and_options_it_did_not_know_stay(kind: str) -> None:
    model, optimizer = trained()
    optimizer.param_groups[0]["maximize"] = True
    state = saved(lambda state: [state["param_groups"][0].pop(key) for key in ("maximize", "decoupled_weight_decay")])
    load_optimizer_state_dict(model, optimizer, state, kind)
    assert restored(optimizer)
    assert [optimizer.param_groups[0][key] for key in ("maximize", "decoupled_weight_decay")] == [True, True]


def test_state_that_would_be_lost_is_refused() -> None:
    model, optimizer = trained()
    optimizer.state["shared"] = {"t": 2}  # type: ignore[index]  # as some optimizers have it
    assert failure(lambda: optimizer_state_dict(model, optimizer)) == (
        "AdamW keeps state under 'shared', which is no parameter, and so has no name in a state dict; keep it under a "
        "parameter, or among the options of a group"
    )


@pytest.mark.parametrize("value", ["shard", None, 3])
def test_a_wrong_state_dict_type_is_refused(value: Any) -> None:
    model, optimizer = trained()
    for call in (
        lambda: optimizer_state_dict(model, optimizer, value),
        lambda: load_optimizer_state_dict(model, optimizer, saved(), value),
    ):
        assert failure(call).startswith(f"state_dict_type: expected 'full' or 'sharded', found {value!r}")


def restored(optimizer: torch.optim.Optimizer) -> bool:
    return same(values(optimizer), values(trained(1)[1]))


def test_state_of_a_parameter_that_has_not_been_stepped_with_may_be_empty() -> None:
    model, optimizer = trained(2)
    load_optimizer_state_dict(model, optimizer, saved(put("state", "1.bias", {})))
    assert not optimizer.state[model.get_parameter("1.bias")]


def test_what_is_no_optimizer_is_refused() -> None:
    model = trained()[0]
    for call in (
        lambda: optimizer_state_dict(model, None),  # type: ignore[arg-type]  # the wrong type is the point
        lambda: load_optimizer_state_dict(model, None, saved()),  # type: ignore[arg-type]  # likewise
    ):
        assert failure(call) == "expected a torch.optim.Optimizer, found NoneType"


# On ranks


def test_state_that_cannot_be_sent_is_refused_on_every_rank(ranks: Ranks) -> None:
    def work() -> list[str]:
        strange = lambda: None  # noqa: E731  # what can't be pickled
        states = [saved(put("state", "1.bias", "note", strange)), saved(put("param_groups", 0, "note", strange))]
        return [failure(lambda state=state: load_optimizer_state_dict(*trained(), state)) for state in states]  # type: ignore[misc]  # its default

    first, second = ranks(work)
    assert first == second
    places = ["'1.bias', 'note'", "'param_groups'"]
    for found, where in zip(first, places, strict=True):
        assert found.startswith(f"{PREFIX}{where}: can't be sent to the other ranks by pickle: ")


def test_a_full_state_dict_is_on_rank_0_alone(ranks: Ranks) -> None:
    results = ranks(lambda: optimizer_state_dict(*trained(1)))
    assert same(results[0]["state"], saved()["state"])
    assert results[1] == {}


@pytest.mark.parametrize("given", [None, {}, {"state": 3}])
def test_rank_0s_full_dict_is_loaded_on_every_rank_whatever_the_others_pass(ranks: Ranks, given: Any) -> None:
    def work() -> tuple[bool, float]:
        model, optimizer = trained(2 + core.rank())
        state = saved(put("param_groups", 0, "lr", 7.0)) if core.rank() == 0 else given
        load_optimizer_state_dict(model, optimizer, state)
        return restored(optimizer), optimizer.param_groups[0]["lr"]

    assert ranks(work, world_size=3) == [(True, 7.0)] * 3


def test_a_sharded_state_dict_comes_back(ranks: Ranks) -> None:
    def work() -> bool:
        model, optimizer = trained(2)
        load_optimizer_state_dict(model, optimizer, optimizer_state_dict(*trained(1), "sharded"), "sharded")
        return restored(optimizer)

    assert ranks(work) == [True, True]


def sharded(state: dict[str, Any]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (core.world_size(),))
    cut = {
        name: {
            key: distribute_tensor(value, mesh, [Shard(0)]) if value.dim() else value for key, value in entries.items()
        }
        for name, entries in state["state"].items()
    }
    return {**state, "state": cut}


def test_a_sharded_dict_of_dtensors_is_loaded_whatever_its_order_on_each_rank(ranks: Ranks) -> None:
    def work() -> bool:
        state = sharded(saved())
        if core.rank():
            turned = {name: dict(reversed(entries.items())) for name, entries in reversed(state["state"].items())}
            state = {**state, "state": turned}
        model, optimizer = trained(2)
        load_optimizer_state_dict(model, optimizer, state, "sharded")
        return all(
            same(optimizer.state[p][k], saved()["state"][n][k]) for n, p in model.named_parameters() for k in KEYS
        )

    assert ranks(work, world_size=3) == [True] * 3


KEYS = ("step", "exp_avg", "exp_avg_sq")


def errors_on_ranks(ranks: Ranks, given: Callable[[], Any], kind: str, world_size: int = 2) -> list[str]:
    """Return what each rank raises, after making sure that it came at once and that nothing was loaded."""

    def work() -> tuple[str, float]:
        state = given()
        start = time.monotonic()
        return PREFIX + refused(state, kind), time.monotonic() - start

    results = ranks(work, world_size=world_size)
    assert max(seconds for _, seconds in results) < 10
    return [text for text, _ in results]


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_full_dict_of_rank_0_that_does_not_fit_is_one_error_on_every_rank(ranks: Ranks, misfit: str) -> None:
    make, text = MISFITS[misfit]
    assert errors_on_ranks(ranks, lambda: make() if core.rank() == 0 else None, "full") == [PREFIX + text] * 2


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_sharded_dict_that_does_not_fit_on_one_rank_is_one_error_on_every_rank(ranks: Ranks, misfit: str) -> None:
    make, text = MISFITS[misfit]
    expected = f"{PREFIX}{text} (on rank 1 alone)"
    found = errors_on_ranks(ranks, lambda: make() if core.rank() == 1 else saved(), "sharded")
    assert [error.partition("\n  - rank 1: not the same")[0] for error in found] == [expected] * 2


def test_a_value_that_cannot_be_copied_on_one_rank_is_one_error_on_every_rank(ranks: Ranks) -> None:
    def work() -> str:
        model, optimizer = trained()
        if core.rank() == 1:
            optimizer.state[model.get_parameter("0.bias")]["lock"] = threading.Lock()
        return failure(lambda: optimizer_state_dict(model, optimizer))

    told = "rank 1 of 2: a lock in the state can't be copied: TypeError: cannot pickle '_thread.lock' object; "
    assert ranks(work) == [f"{told}keep plain values there"] * 2


def test_a_hook_of_an_optimizer_that_fails_on_one_rank_is_one_error_on_every_rank(ranks: Ranks) -> None:
    def work() -> str:
        model, optimizer = trained()
        optimizer.register_load_state_dict_post_hook(lambda _: 1 // (1 - core.rank()))  # type: ignore[arg-type]  # a hook that returns what nobody reads
        return failure(lambda: load_optimizer_state_dict(model, optimizer, saved()))

    assert ranks(work) == ["rank 1 of 2: ZeroDivisionError: integer division or modulo by zero"] * 2


def drop_bias(state: dict[str, Any]) -> None:
    del state["state"]["1.bias"]


def add_key(state: dict[str, Any]) -> None:
    state["state"]["1.bias"]["also"] = torch.ones(2)


@pytest.mark.parametrize("change", [drop_bias, add_key, lambda state: state.update(sharded(state))])
def test_sharded_dicts_that_hold_different_entries_are_refused(ranks: Ranks, change: Callable[[Any], Any]) -> None:
    """A DTensor is put together by all ranks; one that lacks the entry would not come."""

    def given() -> Any:
        odd, even = copy.deepcopy(saved()), saved()
        # Cutting is a collective of all ranks.
        change(odd)
        return odd if core.rank() == 1 else even

    told = f"{PREFIX}rank 1: not the same entries as on rank 0, or not sharded alike"
    assert errors_on_ranks(ranks, given, "sharded") == [told] * 2


def test_ranks_that_load_in_different_ways_are_refused(ranks: Ranks) -> None:
    def work() -> str:
        return failure(lambda: load_optimizer_state_dict(*trained(), saved(), ["full", "sharded"][core.rank()]))

    told = (
        "the ranks do not agree: state_dict_type is full on rank 0, sharded on rank 1; make the same call on every rank"
    )
    assert ranks(work) == [told] * 2


def test_an_optimizer_of_another_model_on_one_rank_is_one_error_on_every_rank(ranks: Ranks) -> None:
    def work() -> str:
        model, optimizer = trained()
        if core.rank() == 1:
            optimizer = torch.optim.AdamW(copy.deepcopy(model).parameters())
        return failure(lambda: load_optimizer_state_dict(model, optimizer, saved()))

    text, other = ranks(work)
    assert text == other
    assert text.startswith("rank 1 of 2: the optimizer holds 4 parameters that are not the model's")
