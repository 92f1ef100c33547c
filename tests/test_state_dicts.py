"""The model's state dicts, as the verbs give and take them for the bare model, in one process and on ranks."""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from parallel_core import (
    DistributedConfig,
    IncompatibleKeys,
    StateDictError,
    StateDictType,
    StrategyError,
    WrapError,
    load_model_state_dict,
    model_state_dict,
    optimizer_state_dict,
    wrap_model_for_training,
)
from parallel_core import ranks as core
from parallel_core.state_dicts import describe, named, parse_state_dict_type
from parallel_core.testing import Ranks

PREFIX = "the state dict does not fit the model; nothing was loaded:\n  - "


class Net(nn.Module):
    """Tied parameters, buffers of every kind and extra state."""

    mask: Tensor
    steps: Tensor
    norm: nn.Module

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 4, bias=False)
        self.gate = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.full((2,), float(seed)), persistent=False)
        self.note = {"seed": seed}
        for tensor in (*self.parameters(), *self.norm.buffers(), self.mask, self.steps):
            highest = 2 if tensor.dtype is torch.bool else 100
            tensor.data.copy_(torch.randint(highest, tensor.shape, generator=generator))
        self.head.weight = self.embed.weight

    def get_extra_state(self) -> dict[str, int]:
        return self.note

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.note = state

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x))
        return self.head(x)  # type: ignore[no-any-return]  # calls of modules are not typed


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    def alike(a: Any, b: Any) -> bool:
        if not isinstance(a, Tensor):
            return bool(a == b)
        alike = (a.dtype, a.shape, a.device) == (b.dtype, b.shape, b.device)
        return alike and (a.is_meta or torch.equal(core.bits(a), core.bits(b)))

    return list(one) == list(other) and all(alike(one[name], other[name]) for name in one)


def failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except StateDictError as error:
        return str(error)
    return ""


def refused(state_dict: Any, **arguments: Any) -> str:
    """Return why a dict is refused, after making sure that nothing was loaded and the dict is as it was."""
    model = Net()
    before, given = copy.deepcopy(model.state_dict()), copy.deepcopy(state_dict)
    text = failure(lambda: load_model_state_dict(model, state_dict, **arguments))
    assert same(model.state_dict(), before)
    if isinstance(state_dict, dict):
        assert same(state_dict, given)
    return text.removeprefix(PREFIX)


def saved() -> dict[str, Any]:
    """Return a state dict that no rank has to be asked for."""
    return copy.deepcopy(Net(1).state_dict())


def changed(**entries: Any) -> dict[str, Any]:
    """Return a state dict with other entries; those that are None are taken out."""
    state = {**saved(), **{name.replace("__", "."): value for name, value in entries.items()}}
    return {name: value for name, value in state.items() if value is not None}


def test_the_keys_are_the_bare_models_in_its_order() -> None:
    for kind in ("full", "sharded"):
        assert list(model_state_dict(Net(), kind)) == list(Net().state_dict())


def test_non_persistent_buffers_are_left_out_and_tied_names_are_all_there() -> None:
    state = model_state_dict(Net())
    assert "cache" not in state
    assert state["embed.weight"].equal(state["head.weight"])


def test_a_full_state_dict_is_a_snapshot_whose_entries_share_no_memory() -> None:
    model = Net()
    state = model_state_dict(model)
    before = copy.deepcopy(state)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    model.note["seed"] = 99
    assert same(state, before)
    pointers = [value.data_ptr() for value in state.values() if isinstance(value, Tensor)]
    assert len(set(pointers)) == len(pointers), "tied names must not share memory either: safetensors refuses that"
    assert not any(value.requires_grad for value in state.values() if isinstance(value, Tensor))


def test_a_sharded_state_dict_may_share_memory_and_needs_no_gradient() -> None:
    model = Net()
    state = model_state_dict(model, "sharded")
    assert state["gate"].data_ptr() == model.gate.data_ptr()
    assert not any(value.requires_grad for value in state.values() if isinstance(value, Tensor))


@pytest.mark.parametrize("kind", ["full", "sharded", StateDictType.FULL, StateDictType.SHARDED])
def test_a_round_trip_is_bitwise(kind: str) -> None:
    source, target = Net(1), Net(2)
    assert load_model_state_dict(target, model_state_dict(source, kind), kind) == IncompatibleKeys([], [])
    assert same(target.state_dict(), source.state_dict())
    assert target.head.weight is target.embed.weight
    assert target.note == {"seed": 1}
    assert target.get_buffer("cache").tolist() == [2.0, 2.0], "what is not in the dict stays"


def test_what_is_loaded_shares_no_memory_with_the_dict() -> None:
    for kind in ("full", "sharded"):
        state, target = model_state_dict(Net(1)), Net(2)
        load_model_state_dict(target, state, kind)
        with torch.no_grad():
            target.gate.zero_()
        assert same(state, model_state_dict(Net(1)))


def test_not_a_number_is_loaded_as_it_is() -> None:
    state = changed(gate=torch.tensor([torch.nan, torch.inf, -0.0], dtype=torch.bfloat16))
    target = Net()
    load_model_state_dict(target, state)
    assert core.bits(target.gate).equal(core.bits(state["gate"]))


def test_loading_keeps_gradients_and_the_parameters_themselves() -> None:
    model = Net()
    parameters = [id(parameter) for parameter in model.parameters()]
    model.gate.grad = torch.ones(3, dtype=torch.bfloat16)
    load_model_state_dict(model, model_state_dict(Net(1)))
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert model.gate.grad.tolist() == [1.0] * 3
    assert model.gate.requires_grad


def test_a_compiled_model_and_compiled_parts_give_and_take_bare_names() -> None:
    bare = Net(1)
    in_part: Any = Net(2)
    in_part.norm = torch.compile(in_part.norm, backend="aot_eager")
    models: list[Any] = [in_part, *(torch.compile(model, backend="aot_eager") for model in (in_part, Net(3)))]
    for model in models:
        load_model_state_dict(model, model_state_dict(bare))
        assert same(model_state_dict(model), bare.state_dict())
        assert same(model_state_dict(model, "sharded"), bare.state_dict())


def test_an_ordered_mapping_of_another_kind_is_taken() -> None:
    class Lazily(Mapping[str, Any]):
        entries = model_state_dict(Net(1))

        def __getitem__(self, name: str) -> Any:
            return self.entries[name]

        def __iter__(self) -> Any:
            return iter(self.entries)

        def __len__(self) -> int:
            return len(self.entries)

    target = Net()
    load_model_state_dict(target, Lazily())
    assert same(target.state_dict(), Net(1).state_dict())


def test_the_order_of_the_dict_plays_no_part() -> None:
    state, target = model_state_dict(Net(1)), Net()
    load_model_state_dict(target, dict(reversed(state.items())))
    assert same(target.state_dict(), Net(1).state_dict())


MISFITS: list[tuple[Callable[[], Any], str]] = [
    (lambda: changed(gate=None), "missing keys: 'gate'"),
    (lambda: changed(gate=None, norm__bias=None), "missing keys: 'gate', 'norm.bias'"),
    (lambda: changed(ghost=torch.ones(1)), "unexpected keys: 'ghost'"),
    (
        lambda: changed(gate=None, gaet=torch.ones(3)),
        "missing keys: 'gate'\n  - unexpected keys: 'gaet'; did you mean 'gate'?",
    ),
    (lambda: changed(_extra_state=None), "missing keys: '_extra_state'"),
    (lambda: changed(cache=torch.ones(2)), "unexpected keys: 'cache'"),
    (
        lambda: changed(gate=torch.ones(4, dtype=torch.bfloat16)),
        "'gate': wrong shape: the model has bfloat16[3], the state dict bfloat16[4]",
    ),
    (
        lambda: changed(steps=torch.ones(1, dtype=torch.int64)),
        "'steps': wrong shape: the model has int64[], the state dict int64[1]",
    ),
    (
        lambda: changed(gate=torch.ones(3)),
        "'gate': wrong dtype: the model has bfloat16[3], the state dict float32[3]; cast=True converts",
    ),
    (
        lambda: changed(mask=torch.ones(3)),
        "'mask': wrong dtype: the model has bool[3], the state dict float32[3]",
    ),
    (lambda: changed(gate=[1, 2, 3]), "'gate': expected a tensor, found list"),
    (
        lambda: changed(gate=torch.ones(3, dtype=torch.bfloat16, device="meta")),
        "'gate': found a tensor on the meta device, which has no values",
    ),
    (
        lambda: changed(head__weight=torch.ones(4, 2)),
        (
            "'embed.weight' and 'head.weight' are one parameter of the model and have different values in the state "
            "dict; drop one of them and load with strict=False"
        ),
    ),
    (
        lambda: changed(gate=torch.ones(4), steps=[1], ghost=1),
        (
            "unexpected keys: 'ghost'\n"
            "  - 'gate': wrong shape: the model has bfloat16[3], the state dict float32[4]\n"
            "  - 'steps': expected a tensor, found list"
        ),
    ),
    (lambda: [("gate", 1)], "expected a dict of tensors by name, found list"),
    (lambda: None, "expected a dict of tensors by name, found NoneType"),
    (lambda: Net(), "expected a dict of tensors by name, found Net"),
    (
        dict,
        (
            "missing keys: 'gate', 'mask', 'steps', '_extra_state', 'embed.weight', 'norm.weight', 'norm.bias', "
            "'norm.running_mean', 'norm.running_var', 'norm.num_batches_tracked' and 1 more"
        ),
    ),
    (lambda: changed(gate=None) | {3: torch.ones(1)}, "missing keys: 'gate'\n  - unexpected keys: '3'"),
]


@pytest.mark.parametrize(("state_dict", "text"), MISFITS, ids=[text[:40] for _, text in MISFITS])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_what_does_not_fit_is_refused_and_nothing_is_loaded(
    state_dict: Callable[[], Any], text: str, kind: str
) -> None:
    assert refused(state_dict(), state_dict_type=kind) == text


def test_a_dict_that_fails_when_it_is_read_is_refused() -> None:
    class Torn(dict[str, Any]):
        def __getitem__(self, name: str) -> Any:
            raise OSError("read error")

    assert failure(lambda: load_model_state_dict(Net(), Torn(changed()))) == f"{PREFIX}OSError: read error"


def test_no_more_than_ten_problems_are_told() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    state = {name: torch.ones(5) for name in model.state_dict()}
    text = failure(lambda: load_model_state_dict(model, state))
    assert text.count("wrong shape") == 10
    assert text.endswith("\n  - and 6 more problems like these")


def test_strict_false_loads_what_is_there_and_returns_the_true_lists() -> None:
    target = Net(2)
    found = load_model_state_dict(
        target, changed(gate=None, norm__bias=None, ghost=torch.ones(1), also=3), strict=False
    )
    assert found == IncompatibleKeys(missing_keys=["gate", "norm.bias"], unexpected_keys=["ghost", "also"])
    expected = {**Net(1).state_dict(), "gate": Net(2).gate, "norm.bias": Net(2).norm.bias}
    assert same(target.state_dict(), expected)


def test_strict_false_loads_a_tied_parameter_by_either_of_its_names() -> None:
    for name in ("embed__weight", "head__weight"):
        target = Net(2)
        found = load_model_state_dict(target, changed(**{name: None}), strict=False)
        assert found.missing_keys == [name.replace("__", ".")]
        assert same(target.state_dict(), Net(1).state_dict())


def test_strict_false_leaves_extra_state_alone_that_is_missing() -> None:
    target = Net(2)
    load_model_state_dict(target, changed(_extra_state=None), strict=False)
    assert target.note == {"seed": 2}


@pytest.mark.parametrize("strict", [True, False])
def test_wrong_shapes_and_dtypes_are_refused_even_without_strict(*, strict: bool) -> None:
    assert "wrong shape" in refused(changed(gate=torch.ones(4, dtype=torch.bfloat16)), strict=strict)
    assert "wrong dtype" in refused(changed(gate=torch.ones(3)), strict=strict)
    assert "different values" in refused(changed(head__weight=torch.ones(4, 2)), strict=strict)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_cast_converts_another_dtype(kind: str) -> None:
    target = Net(2)
    values = torch.tensor([1.5, 2.0, 3.0], dtype=torch.float64)
    load_model_state_dict(target, changed(gate=values), kind, cast=True)
    assert target.gate.dtype is torch.bfloat16
    assert target.gate.tolist() == [1.5, 2.0, 3.0]


def test_cast_does_not_excuse_a_shape() -> None:
    assert "wrong shape" in refused(changed(gate=torch.ones(4)), cast=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("ful", "state_dict_type: expected 'full' or 'sharded', found 'ful'; did you mean 'full'?"),
        ("FULL", "state_dict_type: expected 'full' or 'sharded', found 'FULL'; did you mean 'full'?"),
        (None, "state_dict_type: expected 'full' or 'sharded', found None"),
        (1, "state_dict_type: expected 'full' or 'sharded', found 1"),
        (["full"], "state_dict_type: expected 'full' or 'sharded', found ['full']; did you mean 'full'?"),
    ],
)
def test_a_wrong_state_dict_type_is_refused_by_every_verb(value: Any, text: str) -> None:
    model = Net()
    assert failure(lambda: parse_state_dict_type(value)) == text
    assert failure(lambda: model_state_dict(model, value)) == text
    assert failure(lambda: load_model_state_dict(model, {}, value)) == text


def test_values_and_lists_are_put_into_words() -> None:
    assert describe(torch.ones(2, 3)) == "float32[2, 3]"
    assert describe(torch.tensor(1)) == "int64[]"
    assert describe({"a": 1}) == "dict"
    assert named("missing", ["a"]) == "missing: 'a'"
    assert named("missing", map(str, range(12))).endswith("'8', '9' and 2 more")


def test_a_model_with_nothing_in_it_has_an_empty_state_dict() -> None:
    assert model_state_dict(nn.Tanh()) == {}
    assert load_model_state_dict(nn.Tanh(), {}) == IncompatibleKeys([], [])


# On ranks


def test_a_full_state_dict_is_on_rank_0_alone(ranks: Ranks) -> None:
    def work() -> tuple[bool, int]:
        state = model_state_dict(Net(1))
        return same(state, Net(1).state_dict()), len(state)

    assert ranks(work) == [(True, 11), (False, 0)]


@pytest.mark.parametrize("given", [{}, None, {"nonsense": 1}])
def test_rank_0s_full_dict_is_loaded_on_every_rank_whatever_the_others_pass(
    ranks: Ranks, given: dict[str, Any] | None
) -> None:
    def work() -> tuple[bool, bool, Any]:
        target = Net(2 + core.rank())
        state = saved() if core.rank() == 0 else copy.copy(given)
        found = load_model_state_dict(target, state)
        return same(target.state_dict(), Net(1).state_dict()), target.note == {"seed": 1}, tuple(found)

    assert ranks(work, world_size=3) == [(True, True, ([], []))] * 3


def test_a_sharded_state_dict_is_on_every_rank_and_comes_back(ranks: Ranks) -> None:
    def work() -> tuple[bool, bool]:
        source, target = Net(1), Net(2)
        state = model_state_dict(source, "sharded")
        load_model_state_dict(target, state, "sharded")
        return list(state) == list(source.state_dict()), same(target.state_dict(), source.state_dict())

    assert ranks(work) == [(True, True)] * 2


def test_a_sharded_dict_of_dtensors_is_loaded_into_the_bare_model(ranks: Ranks) -> None:
    def work() -> tuple[bool, bool]:
        state = saved()
        mesh = init_device_mesh("cpu", (core.world_size(),))
        given = {
            name: distribute_tensor(value, mesh, [Shard(0)]) if isinstance(value, Tensor) and value.dim() else value
            for name, value in state.items()
        }
        before = dict(given)
        target = Net(2)
        load_model_state_dict(target, given, "sharded")
        return same(target.state_dict(), Net(1).state_dict()), all(given[name] is before[name] for name in before)

    assert ranks(work, world_size=3) == [(True, True)] * 3


def errors_on_ranks(ranks: Ranks, work: Callable[[], Any], world_size: int = 2) -> list[str]:
    """Return what each rank raises, after making sure that it came at once and that nothing was loaded."""

    def timed() -> tuple[str, float]:
        start = time.monotonic()
        return failure(work), time.monotonic() - start

    results = ranks(timed, world_size=world_size)
    assert max(seconds for _, seconds in results) < 10
    return [text for text, _ in results]


BROKEN: dict[str, Callable[[], Any]] = {
    "missing": lambda: changed(gate=None),
    "unexpected": lambda: changed(ghost=torch.ones(1)),
    "shape": lambda: changed(gate=torch.ones(4, dtype=torch.bfloat16)),
    "dtype": lambda: changed(gate=torch.ones(3)),
    "tied": lambda: changed(head__weight=torch.ones(4, 2)),
    "no dict": lambda: [1],
    "none": lambda: None,
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_full_dict_of_rank_0_that_does_not_fit_is_one_error_on_every_rank(ranks: Ranks, broken: str) -> None:
    def work() -> None:
        model, before = Net(2), Net(2).state_dict()
        try:
            load_model_state_dict(model, BROKEN[broken]() if core.rank() == 0 else {})
        finally:
            assert same(model.state_dict(), before)

    texts = errors_on_ranks(ranks, work)
    assert texts == [PREFIX + refused(BROKEN[broken]())] * 2


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("where", [(1,), (0, 1, 2)])
def test_a_sharded_dict_that_does_not_fit_on_some_ranks_is_one_error_on_every_rank(
    ranks: Ranks, broken: str, where: tuple[int, ...]
) -> None:
    def work() -> None:
        model, before = Net(2), Net(2).state_dict()
        try:
            load_model_state_dict(model, BROKEN[broken]() if core.rank() in where else changed(), "sharded")
        finally:
            assert same(model.state_dict(), before)

    text, *others = errors_on_ranks(ranks, work, world_size=3)
    assert others == [text] * 2
    alone = "" if len(where) == 3 else " (on rank 1 alone)"
    assert text.startswith(PREFIX + refused(BROKEN[broken]()).partition("; did")[0] + alone)


def test_different_problems_of_the_ranks_are_all_told(ranks: Ranks) -> None:
    def work() -> None:
        state = changed(gate=None) if core.rank() == 0 else changed(steps=torch.ones(2))
        load_model_state_dict(Net(2), state, "sharded")

    told = (
        f"{PREFIX}missing keys: 'gate' (on rank 0 alone)\n"
        "  - 'steps': wrong shape: the model has int64[], the state dict float32[2] (on rank 1 alone)"
    )
    assert errors_on_ranks(ranks, work) == [told] * 2


def test_strict_false_returns_the_same_lists_on_every_rank(ranks: Ranks) -> None:
    def full() -> Any:
        state = changed(gate=None, ghost=1) if core.rank() == 0 else None
        model = Net(2)
        found = tuple(load_model_state_dict(model, state, strict=False))
        return found, same(model.state_dict(), {**Net(1).state_dict(), "gate": Net(2).gate})

    def sharded() -> Any:
        state = changed(gate=None) if core.rank() == 0 else changed(norm__bias=None, ghost=1)
        model = Net(2)
        found = tuple(load_model_state_dict(model, state, "sharded", strict=False))
        expected = {**Net(1).state_dict(), "gate": Net(2).gate, "norm.bias": Net(2).norm.bias}
        return found, same(model.state_dict(), expected)

    assert ranks(full) == [((["gate"], ["ghost"]), True)] * 2
    assert ranks(sharded) == [((["gate", "norm.bias"], ["ghost"]), True)] * 2


def test_cast_converts_rank_0s_tensors_on_every_rank(ranks: Ranks) -> None:
    def work() -> Any:
        target = Net(2)
        state = changed(gate=torch.tensor([1.5, 2.0, 3.0])) if core.rank() == 0 else None
        load_model_state_dict(target, state, cast=True)
        return target.gate.dtype, target.gate.tolist()

    assert ranks(work) == [(torch.bfloat16, [1.5, 2.0, 3.0])] * 2


@pytest.mark.parametrize("flag", ["yes", None, 1, torch.ones(2)])
@pytest.mark.parametrize("name", ["strict", "cast"])
def test_a_flag_that_is_none_is_refused(name: str, flag: Any) -> None:
    options: dict[str, Any] = {name: flag}
    told = f"{name}: expected True or False, found {type(flag).__name__}"
    assert failure(lambda: load_model_state_dict(Net(2), changed(), **options)) == told


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([{}, {"strict": False}], "strict is True on rank 0, False on rank 1"),
        ([{"cast": True}, {}], "cast is True on rank 0, False on rank 1"),
        (
            [{"state_dict_type": "sharded"}, {"state_dict_type": "full"}],
            "state_dict_type is sharded on rank 0, full on rank 1",
        ),
    ],
)
def test_ranks_that_load_in_different_ways_are_refused(
    ranks: Ranks, arguments: list[dict[str, Any]], found: str
) -> None:
    def work() -> None:
        load_model_state_dict(Net(2), changed(), **arguments[core.rank()])

    told = f"the ranks do not agree: {found}; make the same call on every rank"
    assert errors_on_ranks(ranks, work) == [told] * 2


def test_entries_that_are_sharded_on_some_ranks_only_are_refused(ranks: Ranks) -> None:
    """Putting a DTensor together takes every rank; one that has the whole tensor would not come."""

    def work() -> None:
        state = changed()
        mesh = init_device_mesh("cpu", (core.world_size(),))
        cut = distribute_tensor(state["norm.bias"], mesh, [Shard(0)])
        load_model_state_dict(Net(2), state if core.rank() else {**state, "norm.bias": cut}, "sharded")

    told = f"{PREFIX}rank 1, 2: not the same entries as on rank 0, or not sharded alike"
    assert errors_on_ranks(ranks, work, world_size=3) == [told] * 3


def test_a_dtensor_in_a_full_dict_is_refused_on_every_rank(ranks: Ranks) -> None:
    def work() -> None:
        state = changed()
        cut = distribute_tensor(state["norm.bias"], init_device_mesh("cpu", (2,)), [Shard(0)])
        load_model_state_dict(Net(2), {**state, "norm.bias": cut})

    told = f"{PREFIX}'norm.bias': found a DTensor in a full state dict; pass state_dict_type='sharded'"
    assert errors_on_ranks(ranks, work) == [told] * 2


def test_a_hook_that_returns_other_names_is_an_error_that_names_the_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    from parallel_core.strategy import Strategy

    monkeypatch.setattr(Strategy, "model_state_dict", lambda *arguments: {"0.weight": 1, "ghost": 2})
    with pytest.raises(StrategyError) as caught:
        model_state_dict(nn.Sequential(nn.Linear(2, 2)))
    assert str(caught.value) == (
        "strategy 'bare' (parallel-core ): hook model_state_dict returned other names than the bare model's: "
        "missing: '0.bias'; unexpected: 'ghost'; this is a bug in parallel-core"
    )


def test_a_model_that_was_changed_after_the_wrap_is_told_of(ranks: Ranks) -> None:
    def work() -> list[str]:
        found = []
        for change in ("buffer", "parameter"):
            net = Net()
            net.register_buffer("mean", None)
            model = wrap_model_for_training(net, DistributedConfig(parallel_strategy="ddp"))
            assert model is not None
            if change == "buffer":
                net.mean = torch.zeros(2)
            else:
                net.late = nn.Linear(2, 2)
            optimizer = torch.optim.SGD(model.parameters())
            found += [
                failure(partial(model_state_dict, model)),
                failure(partial(load_model_state_dict, model, {})),
                failure(partial(optimizer_state_dict, model, optimizer)),
            ]
        return found

    for found in ranks(work):
        told = [message.partition("wrapped: ")[2].partition(";")[0] for message in found]
        assert told == ["the buffer 'mean' was added"] * 3 + ["it had 4 parameters and has 6"] * 3, found


def test_a_state_dict_of_copies_is_refused_where_something_would_be_loaded(ranks: Ranks) -> None:
    """Loading into the copies that a hook has made would report success and change nothing."""

    class Halved(Net):
        def __init__(self) -> None:
            super().__init__()

            def halve(_module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: Any) -> None:
                state["gate"] = state["gate"].half()

            self.register_state_dict_post_hook(halve)  # type: ignore[no-untyped-call]  # torch's own is not annotated

    text = "in the state dict, and no tensors of the model, so that nothing can be loaded into them: 'gate'; let the"
    bare = Halved()
    assert text in failure(lambda: load_model_state_dict(bare, bare.state_dict()))

    def work() -> str:
        with pytest.raises(WrapError) as caught:
            wrap_model_for_training(Halved(), DistributedConfig(parallel_strategy="ddp"))
        return str(caught.value)

    assert all(text in found for found in ranks(work))


def test_nothing_is_loaded_into_a_bare_model_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    assert failure(lambda: load_model_state_dict(model, nn.Linear(2, 2).state_dict())).startswith(
        "on the meta device: 'weight', 'bias'; give the model memory first"
    )


def test_a_sparse_tensor_is_refused_on_every_rank(ranks: Ranks) -> None:
    def work() -> str:
        model = nn.Linear(2, 2)
        state = model_state_dict(model)
        if state:
            state["weight"] = state["weight"].to_sparse()
        return failure(lambda: load_model_state_dict(model, state, cast=True))

    assert all("'weight': found a sparse tensor; make it dense" in found for found in ranks(work))


def test_ranks_that_read_in_different_ways_are_refused(ranks: Ranks) -> None:
    def work() -> list[str]:
        model = Net()
        kinds: Any = (torch.optim.SGD, torch.optim.AdamW)
        optimizer = kinds[core.rank()](model.parameters())
        return [
            failure(lambda: model_state_dict(model, ("full", "sharded")[core.rank()])),
            failure(lambda: optimizer_state_dict(model, optimizer)),
        ]

    told = [
        "state_dict_type is full on rank 0, sharded on rank 1",
        "the optimizer is SGD on rank 0, AdamW on rank 1",
    ]
    assert ranks(work) == [[f"the ranks do not agree: {each}; make the same call on every rank" for each in told]] * 2


def test_ranks_that_read_or_load_different_models_are_refused(ranks: Ranks) -> None:
    """What one of them sends would fit nothing on the other, which ends a process of gloo's."""

    def work() -> list[str]:
        wide = nn.Linear(2, 3 + core.rank())
        wrapped = wrap_model_for_training(nn.Linear(2, 2), DistributedConfig(parallel_strategy="ddp"))
        assert wrapped is not None
        some_wrapped = wrapped if core.rank() else nn.Linear(2, 2)
        return [
            failure(lambda: model_state_dict(wide, "sharded")),
            failure(lambda: load_model_state_dict(wide, wide.state_dict())),
            failure(lambda: model_state_dict(some_wrapped)),
            failure(lambda: load_model_state_dict(some_wrapped, nn.Linear(2, 2).state_dict())),
        ]

    first, second = ranks(work)
    assert first == second
    shapes = "the ranks do not agree: 'weight' is float32[3, 2] on rank 0, float32[4, 2] on rank 1; 'bias' is"
    assert all(told.startswith(shapes) and told.endswith("pass the same model on every rank") for told in first[:2])
    strategies = "the ranks do not agree: the strategy is 'bare' (parallel-core ) on rank 0, 'ddp' (parallel-core-ddp"
    assert all(told.startswith(strategies) for told in first[2:])


def test_an_optimizer_that_has_state_on_some_ranks_only_is_refused_where_all_are_needed(ranks: Ranks) -> None:
    def work() -> str:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        cut = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
        if core.rank() == 1:
            optimizer.state[model.weight] = {"momentum_buffer": cut}
        return failure(lambda: optimizer_state_dict(model, optimizer))

    told = (
        "the ranks do not agree: the optimizer has 'momentum_buffer' of 'weight' on rank 1, and not on rank 0; take "
        "the same steps on every rank"
    )
    assert ranks(work) == [told] * 2


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_bare_model_without_values_is_not_read(ranks: Ranks, kind: str) -> None:
    def work() -> str:
        return failure(lambda: model_state_dict(nn.Linear(2, 2, device="meta"), kind))

    told = (
        "on the meta device, without values to read: 'weight', 'bias'; give the model values first: load a state "
        "dict, or wrap it"
    )
    assert ranks(work) == [told] * 2


def test_extra_state_that_cannot_be_sent_is_refused_on_every_rank(ranks: Ranks) -> None:
    def work() -> str:
        return failure(lambda: load_model_state_dict(Net(2), changed(_extra_state=lambda: None)))

    first, second = ranks(work)
    assert first == second
    assert first.startswith(f"{PREFIX}'_extra_state': can't be sent to the other ranks by pickle: ")
    alone = nn.Sequential(Net(2))
    load_model_state_dict(alone, {f"0.{name}": value for name, value in changed(_extra_state=len).items()})
    assert alone[0].note is len  # one process needs no pickle


class Moody(nn.Linear):
    """Fails on rank 1, to give its extra state or to take it."""

    gives = True

    def get_extra_state(self) -> int:
        return 1 // (1 - core.rank()) if not self.gives else 1

    def set_extra_state(self, state: int) -> None:
        self.taken = state // (1 - core.rank())


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp", "fsdp2"])
def test_extra_state_that_fails_on_one_rank_is_one_error_on_every_rank(
    ranks: Ranks, strategy: str | None, kind: str
) -> None:
    def work() -> list[str]:
        found = []
        for gives in (False, True):
            moody = Moody(2, 2)
            model: nn.Module = nn.Sequential(nn.Linear(2, 2), moody)
            if strategy:
                model = wrap_model_for_training(model, DistributedConfig(parallel_strategy=strategy)) or model
            moody.gives = gives
            found.append(failure(lambda: load_model_state_dict(model, model_state_dict(model, kind), kind)))  # noqa: B023  # called at once
        return found

    why = "ZeroDivisionError: integer division or modulo by zero"
    told = [
        f"rank 1 of 2: get_extra_state() of Moody failed: {why}",
        f"rank 1 of 2: {why}",
    ]
    assert ranks(work) == [told, told]


def test_a_value_that_cannot_be_copied_is_named() -> None:
    model = Net()
    model.note = {"lock": threading.Lock()}  # type: ignore[dict-item]  # the wrong type is the point
    told = (
        "a dict in the state can't be copied: TypeError: cannot pickle '_thread.lock' object; keep plain values there"
    )
    assert failure(lambda: model_state_dict(model)) == told


class Unpacked:
    """Can be pickled, and made again on rank 0 alone."""

    def __reduce__(self) -> Any:
        return eval, ("1 // (1 - __import__('torch').distributed.get_rank())",)


def test_extra_state_that_a_rank_cannot_make_again_is_refused_on_every_rank(ranks: Ranks) -> None:
    def work() -> str:
        return failure(lambda: load_model_state_dict(Net(2), changed(_extra_state=Unpacked())))

    assert ranks(work) == ["rank 1 of 2: ZeroDivisionError: integer division or modulo by zero"] * 2


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_what_was_made_for_inference_is_not_loaded_into(ranks: Ranks, is_wrapped: bool) -> None:
    def work() -> str:
        model: nn.Module = nn.BatchNorm1d(2)
        state = model.state_dict()
        if is_wrapped:
            model = wrap_model_for_training(model, DistributedConfig(parallel_strategy="ddp")) or model
        with torch.inference_mode():
            next(part for part in model.modules() if "running_mean" in part._buffers).running_mean = torch.ones(2)
            ok = failure(lambda: load_model_state_dict(model, state))
        return ok + failure(lambda: load_model_state_dict(model, state))

    for told in ranks(work):
        assert told.startswith("made under torch.inference_mode(), and not to be written outside of it: ")
        assert "running_mean'" in told


def test_a_cast_of_a_number_that_has_no_place_is_refused() -> None:
    model = nn.Linear(1, 1).to(torch.float16)
    state: dict[str, Any] = {"weight": torch.tensor([[1e6]]), "bias": torch.tensor([math.inf])}
    told = "'weight': found 1e+06, and float16 goes from -65504 to 65504; load it into a model of another dtype"
    assert failure(lambda: load_model_state_dict(model, state, cast=True)) == PREFIX + told
    load_model_state_dict(model, {**state, "weight": torch.ones(1, 1)}, cast=True)
    assert model.bias.item() == math.inf  # it was infinite before


def test_a_cast_that_loses_the_meaning_is_refused() -> None:
    model = nn.Module()
    model.register_buffer("order", torch.zeros(2, dtype=torch.int64))
    found = failure(lambda: load_model_state_dict(model, {"order": torch.tensor([1e30, torch.nan])}, cast=True))
    assert found == f"{PREFIX}'order': wrong dtype: the model has int64[2], the state dict float32[2]"
