"""The record of a wrapped model, and what the bare model is called through every wrapper."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import parallel_core
from parallel_core import (
    clip_grad_norm,
    data_parallel,
    defaults,
    grad_scaler,
    load_model_state_dict,
    load_optimizer_state_dict,
    model_state_dict,
    no_sync,
    optimizer_state_dict,
    wrap_optimizer,
)
from parallel_core.errors import WrapError
from parallel_core.hookspecs import StateDictType
from parallel_core.names import uncompiled
from parallel_core.record import (
    Layout,
    Record,
    TensorSpec,
    attach,
    bare_parameters,
    bare_shapes,
    bare_state,
    find_record,
    inner_module,
    parameter_names,
    spec_of,
)
from parallel_core.strategy import Strategy, bare_model_strategy, bound_strategy
from parallel_core.testing import Ranks

Install = Callable[..., str]


class Bare(nn.Module):
    """Something of everything: tied and frozen parameters, buffers of both kinds, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.restored = state

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.embed(x)) * self.scale
        return self.head(x)  # type: ignore[no-any-return]  # calls of modules are not typed


class Around(nn.Module):
    """A wrapper that is another object than the bare model, and forwards attributes as FSDP1 does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)  # type: ignore[no-any-return]  # calls of modules are not typed

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.module, name)


def compiled(module: nn.Module) -> nn.Module:
    wrapper = torch.compile(module, backend="aot_eager")  # nothing is compiled before the first forward
    assert isinstance(wrapper, nn.Module)
    return wrapper


def record_of(model: nn.Module, strategy: Strategy | None = None) -> Record:
    return Record(strategy or bare_model_strategy(), parallel_core.DistributedConfig(), Layout.of(model))


def wrapped_around(model: nn.Module) -> nn.Module:
    record, wrapper = record_of(model), Around(model)
    attach(record, wrapper, bare=model)
    return wrapper


def wrapped_in_place(model: nn.Module) -> nn.Module:
    attach(record_of(model), model, bare=model)
    return model


VERBS: dict[str, Callable[[nn.Module], Any]] = {
    "wrap_optimizer": lambda model: wrap_optimizer(model, torch.optim.SGD(model.parameters())),
    "model_state_dict": model_state_dict,
    "load_model_state_dict": lambda model: load_model_state_dict(model, {}),
    "optimizer_state_dict": lambda model: optimizer_state_dict(model, torch.optim.SGD(model.parameters())),
    "load_optimizer_state_dict": lambda model: load_optimizer_state_dict(
        model, torch.optim.SGD(model.parameters()), {}
    ),
    "clip_grad_norm": lambda model: clip_grad_norm(model, 1.0),
    "no_sync": no_sync,
    "grad_scaler": grad_scaler,
    "data_parallel": data_parallel,
}


def test_a_layout_is_the_state_dict_without_its_values() -> None:
    layout = Layout.of(Bare())
    assert list(layout.entries) == list(Bare().state_dict())
    assert layout.entries == {
        "scale": TensorSpec((), torch.bfloat16),
        "_extra_state": None,
        "embed.weight": TensorSpec((4, 2), torch.float32),
        "norm.weight": TensorSpec((2,), torch.float32),
        "norm.bias": TensorSpec((2,), torch.float32),
        "norm.running_mean": TensorSpec((2,), torch.float32),
        "norm.running_var": TensorSpec((2,), torch.float32),
        "norm.num_batches_tracked": TensorSpec((), torch.int64),
        "head.weight": TensorSpec((4, 2), torch.float32),
    }
    assert layout.parameters == ("scale", "embed.weight", "norm.weight", "norm.bias")
    assert layout.tied == (("embed.weight", "head.weight"),)
    assert layout.frozen == ("scale",)


def test_a_layout_does_not_see_the_wrappers_of_compile() -> None:
    assert Layout.of(compiled(Bare())) == Layout.of(Bare())
    parts = Layout.of(nn.Sequential(compiled(Bare()), Bare()))
    assert parts == Layout.of(nn.Sequential(Bare(), Bare()))


def test_a_layout_can_be_compared_and_sent() -> None:
    layout = Layout.of(Bare())
    assert pickle.loads(pickle.dumps(layout)) == layout
    other = Bare()
    other.embed.weight.requires_grad_(False)
    assert Layout.of(other) != layout
    assert Layout.of(Bare().half()) != layout


def test_a_tensor_is_described_by_dtype_and_shape() -> None:
    assert str(TensorSpec((4, 2), torch.float32)) == "float32[4, 2]"
    assert str(TensorSpec((), torch.bfloat16)) == "bfloat16[]"


def test_extra_state_has_no_spec_even_where_it_is_a_tensor() -> None:
    assert spec_of("weight", torch.ones(2)) == TensorSpec((2,), torch.float32)
    assert spec_of("weight", 3) is None
    assert spec_of("_extra_state", torch.ones(2)) is None
    assert spec_of("layer._extra_state", torch.ones(2)) is None
    assert spec_of("my_extra_state", torch.ones(2)) == TensorSpec((2,), torch.float32)


def test_a_bare_model_has_no_record() -> None:
    assert find_record(Bare()) is None
    assert find_record(compiled(Bare())) is None


def test_a_wrapped_model_has_its_record_also_inside_compile() -> None:
    for wrapped in (wrapped_around(Bare()), wrapped_in_place(Bare())):
        record = find_record(wrapped)
        assert record is not None
        assert record.layout == Layout.of(Bare())
        assert find_record(compiled(wrapped)) is record


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_the_module_inside_a_wrapped_one(verb: str) -> None:
    bare = Bare()
    wrapped = wrapped_around(bare)
    for inner in (bare, compiled(bare)):
        with pytest.raises(WrapError) as caught:
            VERBS[verb](inner)
        assert str(caught.value) == (
            "this Bare is the module inside a wrapped model, whose parameters may be this rank's shards alone; pass "
            "what wrap_model_for_training returned"
        )
    assert find_record(wrapped) is not None, "the mark on the inner module must not be seen through the wrapper"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_refuses_a_part_of_a_wrapped_model_and_what_holds_one(verb: str) -> None:
    """Their parameters may be shards, and they would be taken for bare models."""
    for wrapped in (wrapped_around(Bare()), wrapped_in_place(Bare())):
        with pytest.raises(WrapError, match=r"^this Embedding is a part of a wrapped model; pass the whole, which"):
            VERBS[verb](inner_module(wrapped).get_submodule("embed"))
        holder = nn.ModuleDict({"generator": wrapped})
        with pytest.raises(WrapError, match=r"^part 'generator' of this ModuleDict is wrapped already, and the whole"):
            VERBS[verb](holder)


def test_what_is_no_model_is_refused() -> None:
    model: Any = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for call in (
        lambda: clip_grad_norm(model.parameters(), 1.0),
        lambda: model_state_dict(None),  # type: ignore[arg-type]  # slips of the user's
        lambda: optimizer_state_dict(optimizer, model),  # type: ignore[arg-type]  # in the wrong order
    ):
        with pytest.raises(WrapError, match=r"^expected a model, a torch.nn.Module, found (generator|NoneType|SGD)$"):
            call()
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(WrapError, match=r"^expected a torch.optim.Optimizer, found StepLR$"):
        wrap_optimizer(model, scheduler)


def test_a_part_of_a_wrapped_model_that_is_gone_is_a_bare_model() -> None:
    bare = Bare()
    wrapped = wrapped_around(bare)
    copied = copy.deepcopy(bare.embed)
    assert find_record(copied) is None
    del wrapped
    assert find_record(bare.embed) is None


def test_a_model_that_was_compiled_before_the_wrap_is_marked_all_the_same() -> None:
    bare = Bare()
    wrapped = wrapped_around(compiled(bare))
    assert find_record(wrapped) is not None
    for inner in (bare, compiled(bare), wrapped.module):
        with pytest.raises(WrapError, match="this Bare is the module inside a wrapped model"):
            find_record(inner)  # type: ignore[arg-type]  # attributes of modules are not typed
    in_place = compiled(Bare())
    wrapped_in_place(in_place)
    assert find_record(in_place) is not None


def test_the_users_module_inside_is_found() -> None:
    bare = Bare()
    assert inner_module(bare) is bare
    wrapped = wrapped_around(bare)
    assert inner_module(wrapped) is bare
    in_place = wrapped_in_place(Bare())
    assert inner_module(in_place) is in_place


@pytest.mark.parametrize("wrap", [wrapped_around, wrapped_in_place])
def test_a_deep_copy_of_a_wrapped_model_is_a_wrapped_model(wrap: Callable[[nn.Module], nn.Module]) -> None:
    wrapped = wrap(Bare())
    copied = copy.deepcopy(wrapped)
    record = find_record(copied)
    assert record is find_record(wrapped)
    assert inner_module(copied) is not inner_module(wrapped)
    assert isinstance(inner_module(copied), Bare)
    assert list(bare_state(inner_module(copied))) == list(Bare().state_dict())
    if isinstance(copied, Around):
        with pytest.raises(WrapError, match="the module inside a wrapped model"):
            find_record(copied.module)


def test_a_deep_copy_of_the_inner_module_alone_is_a_bare_model() -> None:
    """As an average of the weights is kept."""
    wrapped = wrapped_around(Bare())
    average = copy.deepcopy(inner_module(wrapped))
    assert find_record(average) is None
    assert list(model_state_dict(average)) == list(Bare().state_dict())
    with pytest.raises(WrapError):
        find_record(inner_module(wrapped))


def test_a_deep_copy_of_a_model_that_holds_a_wrapped_one_keeps_the_marks() -> None:
    holder = nn.Sequential(wrapped_around(Bare()))
    copied = copy.deepcopy(holder)[0]
    assert find_record(copied) is not None
    assert isinstance(inner_module(copied), Bare)


def test_a_wrapped_model_that_was_pickled_is_still_one(install_strategy: Install) -> None:
    install_strategy("ddp")
    model = nn.Linear(2, 2)
    record, wrapper = record_of(model, bound_strategy("ddp")), nn.Sequential(model)
    attach(record, wrapper, bare=model)
    restored = pickle.loads(pickle.dumps(wrapper))
    found = find_record(restored)
    assert found is not None
    assert found.strategy is bound_strategy("ddp")
    assert found.layout == record.layout
    assert inner_module(restored) is restored[0]


def test_the_parameters_of_a_wrapped_model_have_the_bare_models_names() -> None:
    bare = Bare()
    expected = {name: id(parameter) for name, parameter in bare.named_parameters()}
    for model in (bare, compiled(bare)):
        assert {name: id(parameter) for name, parameter in bare_parameters(model).items()} == expected
    wrapped = wrapped_around(bare)
    assert {name: id(parameter) for name, parameter in bare_parameters(wrapped).items()} == expected
    assert {name: id(parameter) for name, parameter in bare_parameters(compiled(wrapped)).items()} == expected


def test_a_parameter_is_known_by_all_of_its_names() -> None:
    bare = Bare()
    for wrap in (compiled, wrapped_around):
        assert list(parameter_names(wrap(bare)).values()) == [
            ("scale",),
            ("embed.weight", "head.weight"),
            ("norm.weight",),
            ("norm.bias",),
        ]


def test_shapes_are_those_of_the_bare_model() -> None:
    bare = Bare()
    shapes = {"scale": (), "embed.weight": (4, 2), "norm.weight": (2,), "norm.bias": (2,)}
    assert bare_shapes(bare) == shapes
    wrapped = wrapped_around(bare)
    bare.embed.weight.data = torch.empty(0)  # what a rank without a part of it holds
    assert bare_shapes(wrapped) == shapes


def test_the_state_of_a_bare_model_shares_memory_and_has_bare_names() -> None:
    bare = Bare()
    for model in (bare, compiled(bare), nn.Sequential(compiled(bare))[0]):
        state = bare_state(model)
        assert list(state) == list(bare.state_dict())
        assert state["embed.weight"] is bare.embed.weight
        assert state["head.weight"] is bare.embed.weight
        assert state["norm.running_mean"] is bare.norm.running_mean


def test_extra_state_is_handed_to_the_modules_it_belongs_to() -> None:
    model = nn.Sequential(compiled(Bare()), Bare())
    before = {name: value for name, value in bare_state(model).items() if isinstance(value, Tensor)}
    defaults.load_model_state_dict(model, {"0._extra_state": {"seen": 7}}, StateDictType.FULL)
    assert model[0].restored == {"seen": 7}
    assert not hasattr(model[1], "restored")
    assert all(bare_state(model)[name] is value for name, value in before.items())
    assert torch.equal(bare_state(model)["1.scale"], torch.ones((), dtype=torch.bfloat16))


def test_extra_state_that_is_a_tensor_is_handed_over_too() -> None:
    class Meter(nn.Module):
        history: Tensor = torch.arange(3)

        def get_extra_state(self) -> Tensor:
            return self.history.clone()

        def set_extra_state(self, state: Tensor) -> None:
            self.history = state

    source, target = Meter(), Meter()
    source.history = torch.arange(5)  # of another size, which plain torch allows
    load_model_state_dict(target, model_state_dict(source))
    assert target.history.tolist() == [0, 1, 2, 3, 4]


def test_what_was_done_is_not_changed_by_copying() -> None:
    record = record_of(Bare())
    assert copy.deepcopy(record) is record


class Tower(nn.Module):
    """A user's own children with the names that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"module": nn.Linear(2, 2), "_orig_mod": nn.Linear(2, 2)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.module["module"](x)
        return self.module["_orig_mod"](x)  # type: ignore[no-any-return]  # calls of modules are not typed


def test_the_verbs_serve_a_real_wrapper_its_compiled_form_and_its_deep_copy(ranks: Ranks) -> None:
    def work() -> list[list[str]]:
        bare = Tower()
        wrapped = DistributedDataParallel(bare)
        attach(record_of(bare), wrapped, bare=bare)
        copied = copy.deepcopy(wrapped)
        names = []
        for model in (wrapped, compiled(wrapped), copied, compiled(copied)):
            optimizer = wrap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            uncompiled(model)(torch.ones(1, 2)).sum().backward()
            assert clip_grad_norm(model, 1.0).dim() == 0
            optimizer.step()
            before = [parameter.clone() for parameter in model.parameters()]
            state, momentum = model_state_dict(model), optimizer_state_dict(model, optimizer)
            names += [list(state), list(momentum.get("state", {}))]
            optimizer.step()
            load_model_state_dict(model, state)
            load_optimizer_state_dict(model, optimizer, momentum)
            assert all(map(torch.equal, before, model.parameters()))
        return names

    names = [f"module.{child}.{name}" for child in ("module", "_orig_mod") for name in ("weight", "bias")]
    assert ranks(work) == [[names] * 8, [[]] * 8]
