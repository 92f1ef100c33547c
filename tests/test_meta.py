"""A model from the meta device gets the values that it would have had, or an error that names what would have none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parallel_core
from parallel_core import StateDictError, WrapError, wrap_model_for_training, wrap_report
from parallel_core import ranks as core
from parallel_core.errors import ParallelCoreError
from parallel_core.meta import MetaStart
from parallel_core.meta_model import meta_tensors
from parallel_core.strategy import bound_strategy
from parallel_core.testing import Ranks
from parallel_core.testing.models import CASES
from tests.test_wrapping import forget

Install = Callable[..., str]


class Rotary(nn.Module):
    """Its buffer is not saved, and is computed."""

    freqs: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("freqs", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.freqs.copy_(torch.arange(4.0) / 7)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.freqs


class Mixed(nn.Module):
    """Built of torch's own modules, each in the place where its constructor runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.rotary = Rotary()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8) for _ in range(2))
        self.norm = nn.Sequential(nn.BatchNorm1d(4), nn.Conv1d(4, 2, 3))
        self.head = nn.Linear(4, 5, bias=False)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def start(model: nn.Module, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MetaStart(model, lambda started: started).materialise(model)


def same(found: nn.Module, expected: nn.Module) -> bool:
    ours, theirs = tensors_of(found), tensors_of(expected)
    assert list(ours) == list(theirs)
    assert {name: tensor.dtype for name, tensor in ours.items()} == {n: tensor.dtype for n, tensor in theirs.items()}
    return all(torch.equal(core.bits(ours[name]), core.bits(theirs[name])) for name in ours)


def test_the_values_are_those_of_the_same_seed_without_the_meta_device() -> None:
    torch.manual_seed(3)
    built = Mixed()
    assert same(start(on_meta(Mixed), seed=3), built)
    assert not same(start(on_meta(Mixed), seed=4), built)


def test_the_order_is_children_first_and_then_the_module() -> None:
    by_hand = on_meta(Mixed).to_empty(device="cpu")
    torch.manual_seed(3)
    seen: list[str] = []

    def visit(name: str, module: nn.Module) -> None:
        for child_name, child in module.named_children():
            visit(f"{name}.{child_name}" if name else child_name, child)
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            seen.append(name)
            reset: Any = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            reset()

    visit("", by_hand)
    assert same(start(on_meta(Mixed), seed=3), by_hand)
    assert seen[:5] == ["embed", "rotary", "blocks.0.self_attn.out_proj", "blocks.0.self_attn", "blocks.0.linear1"]


def test_a_module_is_handed_over_when_it_and_all_below_it_have_values_and_the_answer_takes_its_place() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)))
    names = {module: name for name, module in model.named_modules()}
    still_meta: list[tuple[str, int]] = []

    def finished(module: nn.Module) -> nn.Module:
        assert not meta_tensors(module)
        still_meta.append((names[module], len(meta_tensors(model))))
        return nn.Sequential(module) if names[module] == "0" else module

    answer = MetaStart(model, lambda started: started).materialise(model, finished)
    assert answer is model
    assert still_meta == [("0.0", 4), ("0.1", 2), ("0", 2), ("1", 0), ("", 0)]
    assert [name for name, _ in model.named_parameters()][:2] == ["0.0.0.weight", "0.0.0.bias"]


def test_tied_and_frozen_parameters_dtypes_marks_and_shared_modules_stay() -> None:
    def make() -> nn.Module:
        layer = nn.Linear(4, 4).to(torch.bfloat16)
        vars(layer.bias)["mark"] = "no decay"
        model = nn.ModuleDict(
            {"a": nn.Embedding(4, 4), "b": nn.Linear(4, 4, bias=False), "c": nn.Sequential(layer), "d": layer}
        )
        model["b"].weight = model["a"].weight
        model["a"].weight.requires_grad_(False)
        return model

    model = start(on_meta(make))
    assert model["b"].weight is model["a"].weight  # type: ignore[index]  # a ModuleDict
    assert model["d"] is model["c"][0]  # type: ignore[index]  # a ModuleDict
    assert [
        (name, type(tensor), tensor.dtype, tensor.requires_grad, vars(tensor))
        for name, tensor in model.named_parameters()
    ] == [
        ("a.weight", nn.Parameter, torch.float32, False, {}),
        ("c.0.weight", nn.Parameter, torch.bfloat16, True, {}),
        ("c.0.bias", nn.Parameter, torch.bfloat16, True, {"mark": "no decay"}),
    ]


def test_what_is_not_on_the_meta_device_keeps_its_value() -> None:
    layer = nn.Linear(2, 2)
    kept = layer.weight.detach().clone()
    assert not meta_tensors(start(nn.Sequential(layer, nn.Linear(2, 2, device="meta"))))
    assert torch.equal(layer.weight, kept)


def test_the_default_device_of_the_caller_plays_no_part() -> None:
    with torch.device("meta"):
        assert not meta_tensors(start(Mixed()))


class Custom(nn.Module):
    """Resets itself in the way that it is told to."""

    weight: nn.Parameter
    table: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.zeros(3))
        self.register_buffer("table", torch.zeros(2, dtype=torch.int32))

    def reset_parameters(self) -> None:
        self.weight.data.fill_(1)  # the old way: no write that torch counts
        match self.how:
            case "in place":
                self.table.fill_(-1)  # the very bytes of what is not written yet
            case "new":
                self.table = torch.arange(2)
            case "wrong shape":
                self.table = torch.arange(3)


@pytest.mark.parametrize("how", ["in place", "new"])
def test_a_module_may_fill_its_tensors_in_place_or_replace_them(how: str) -> None:
    model = start(on_meta(lambda: Custom(how)))
    assert isinstance(model, Custom)
    assert model.weight.tolist() == [1, 1, 1]
    assert (model.table.tolist(), model.table.dtype) == ([-1, -1] if how == "in place" else [0, 1], torch.int32)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        (
            "nothing",
            (
                "reset_parameters of Custom does not give values to all that it owns; left out: '0.table'; initialise "
                "it there, or build the model on a device; this model has to be built again"
            ),
        ),
        (
            "wrong shape",
            (
                "Custom replaces 'table' when it is reset: it had the shape [2], and has [3] on cpu now; fill the "
                "tensor in place; this model has to be built again"
            ),
        ),
    ],
)
def test_a_tensor_that_a_module_leaves_out_when_it_is_reset_is_named(how: str, text: str) -> None:
    with pytest.raises(WrapError) as caught:
        start(on_meta(lambda: nn.Sequential(Custom(how))))
    assert str(caught.value) == text


WHOLE = """
from parallel_core import StrategyConfig, hookimpl

class WholeConfig(StrategyConfig):
    pass

@hookimpl
def strategy_config():
    return WholeConfig

@hookimpl
def wrap_model(model):
    from parallel_core import ranks
    for tensor in (*model.parameters(), *model.buffers()):
        assert not tensor.is_meta
        ranks.broadcast_tensor(tensor)
    return model
"""


@pytest.fixture
def on_ranks(ranks: Ranks, install_strategy: Install) -> Callable[..., list[Any]]:
    """Run a function on ranks that have a strategy installed which has never heard of the meta device."""
    install_strategy("whole", WHOLE)

    def run(function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        def with_fake() -> Any:
            forget()  # a worker serves many tests
            try:
                return function(*args)
            except ParallelCoreError as error:
                return type(error).__name__, str(error)
            finally:
                forget()

        return ranks(with_fake, **options)

    return run


def wrapped(model: nn.Module, **arguments: Any) -> nn.Module:
    config = parallel_core.DistributedConfig(parallel_strategy="whole")
    answer = wrap_model_for_training(model, config, device="cpu", **arguments)
    assert answer is not None
    return answer


def test_a_strategy_that_knows_nothing_of_the_meta_device_gets_the_model_whole(
    on_ranks: Callable[..., list[Any]],
) -> None:
    def work() -> Any:
        torch.manual_seed(core.rank())
        model = wrapped(on_meta(Mixed))
        report = wrap_report(model)
        assert report is not None
        return [tensors_of(model), report.values]

    torch.manual_seed(0)
    expected = tensors_of(Mixed())
    for found, values in on_ranks(work):
        assert values == "reset_parameters, from the meta device"
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_with_a_state_dict_its_values_are_rank_0s_and_what_it_lacks_is_computed(
    on_ranks: Callable[..., list[Any]],
) -> None:
    def work(meta: bool) -> Any:
        torch.manual_seed(7)
        state_dict = dict(Mixed().state_dict()) if core.rank() == 0 else {}
        before = {name: value.clone() for name, value in state_dict.items()}
        model = wrapped(on_meta(Mixed) if meta else Mixed(), state_dict=state_dict)
        report = wrap_report(model)
        assert report is not None
        untouched = all(torch.equal(state_dict[name], before[name]) for name in state_dict)
        return [tensors_of(model), report.values, untouched]

    torch.manual_seed(7)
    expected = tensors_of(Mixed())
    for meta in (True, False):
        for found, values, untouched in on_ranks(work, meta):
            assert untouched
            assert values == "a state dict"
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def refused(on_ranks: Callable[..., list[Any]], make: Callable[[], nn.Module], state_dicts: Any = (None, None)) -> Any:
    """Return the error that every rank raises, after making sure that the model is on the meta device as it was."""

    def work() -> Any:
        model = on_meta(make)
        before = {name: id(tensor) for name, tensor in tensors_of(model).items()}
        try:
            wrapped(model, state_dict=state_dicts[core.rank()])
        finally:
            assert before == {name: id(tensor) for name, tensor in tensors_of(model).items()}
            assert len(meta_tensors(model)) == len(before)

    first, second = on_ranks(work, timeout=30)
    assert first == second
    return first


def test_modules_that_cannot_be_reset_are_named_before_anything_is_touched(
    on_ranks: Callable[..., list[Any]],
) -> None:
    assert refused(on_ranks, CASES["small_parameters"].make) == (
        "WrapError",
        (
            "on the meta device, and nothing gives them values: 'gain', 'shift'; give SmallParameters a method "
            "reset_parameters, pass a state dict, or build the model on a device"
        ),
    )


def test_with_a_state_dict_a_buffer_that_it_lacks_and_nothing_computes_is_named(
    on_ranks: Callable[..., list[Any]],
) -> None:
    state_dict = CASES["buffers"].build().state_dict()
    assert refused(on_ranks, CASES["buffers"].make, (state_dict, None)) == (
        "WrapError",
        (
            "on the meta device, and nothing gives them values: 'scratch'; give Buffers a method reset_parameters, "
            "make it persistent, so that the state dict has it, or build the model on a device"
        ),
    )


def test_a_state_dict_that_does_not_fit_is_refused_before_anything_is_touched(
    on_ranks: Callable[..., list[Any]],
) -> None:
    state_dict = nn.Linear(2, 2).state_dict()
    del state_dict["bias"]
    kind, text = refused(on_ranks, lambda: nn.Linear(2, 2), (state_dict, None))
    assert kind == "StateDictError"
    assert "missing keys: 'bias'" in text


def test_a_state_dict_on_another_rank_than_0_alone_is_refused(on_ranks: Callable[..., list[Any]]) -> None:
    state_dict = nn.Linear(2, 2).state_dict()
    assert refused(on_ranks, lambda: nn.Linear(2, 2), (None, state_dict)) == (
        "WrapError",
        "rank 1 passes a state_dict and rank 0 passes none, and it is rank 0's that counts; pass it there, or nowhere",
    )


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(2)
        self.layer = nn.Linear(2, 2)


def test_a_tensor_that_is_a_plain_attribute_is_named(on_ranks: Callable[..., list[Any]]) -> None:
    def work() -> Any:
        return wrapped(on_meta(Attribute))

    kind, text = on_ranks(work)[0]
    assert kind == "WrapError"
    assert text.startswith("on the meta device, and nothing gives them values: 'table'; give Attribute a method")


class Kept(nn.Module):
    """Keeps its weight in a list too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.weights = [self.layer.weight]


class Viewing(nn.Module):
    """Has a buffer that is a part of another one."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.zeros(4)
        self.register_buffer("whole", whole)
        self.register_buffer("front", whole[:2])

    def reset_parameters(self) -> None:
        self.get_buffer("whole").zero_()


def hooked() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight.register_hook(lambda gradient: gradient * 0)
    return model


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (Kept, "'the model' keeps parameter 'layer.weight' in its attribute 'weights' too, and on the meta device;"),
        (Viewing, "buffer 'front' and buffer 'whole' lie in the same memory, and the wrap would give each its own;"),
        (hooked, "parameter 'weight' on the meta device has a hook for its gradient; register it after the wrap"),
    ],
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_what_would_go_on_with_a_tensor_of_the_meta_device_is_named(
    on_ranks: Callable[..., list[Any]], make: Callable[[], nn.Module], text: str, world_size: int
) -> None:
    def work() -> None:
        wrap_model_for_training(on_meta(make), parallel_core.DistributedConfig(parallel_strategy="whole"))

    for kind, found in on_ranks(work, world_size=world_size):
        assert kind == "WrapError"
        assert text in found


def test_one_process_gets_the_bare_model_with_its_values_on_its_device(install_strategy: Install) -> None:
    install_strategy("whole", WHOLE)
    torch.manual_seed(0)
    model = on_meta(Mixed)
    torch.manual_seed(0)
    assert wrapped(model) is model
    assert wrap_report(model) is None
    torch.manual_seed(0)
    assert same(model, Mixed())


def test_one_process_takes_the_values_of_a_state_dict_as_well(install_strategy: Install) -> None:
    install_strategy("whole", WHOLE)
    torch.manual_seed(5)
    saved = Mixed()
    for model in (on_meta(Mixed), Mixed()):
        assert wrapped(model, state_dict=saved.state_dict()) is model
        assert same(model, saved)
    with pytest.raises(StateDictError, match=r"missing keys: 'embed\.weight'"):
        wrapped(Mixed(), state_dict={})


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")  # torch says so of every lazy module
def test_one_process_is_told_of_tensors_without_a_shape(install_strategy: Install) -> None:
    install_strategy("whole", WHOLE)
    config = parallel_core.DistributedConfig(parallel_strategy="whole")
    with pytest.raises(WrapError, match=r"^not initialized yet: 'weight', 'bias'; run the bare model once"):
        wrapped(on_meta(lambda: nn.LazyLinear(3)))
    assert wrap_model_for_training(nn.LazyLinear(3), config, device="cpu") is None


def test_a_strategy_may_take_the_model_module_by_module(install_strategy: Install) -> None:
    hook = """
@hookimpl
def applies():
    return True

@hookimpl
def wrap_meta_model(model, start):
    seen = []
    answer = start.materialise(model, lambda module: seen.append(module) or module)
    answer.seen = (seen, start.loads)
    return answer
"""
    install_strategy("whole", WHOLE + hook)
    assert "wrap_meta_model" in dir(bound_strategy("whole"))
    model: Any = wrapped(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    assert model.seen == ([model[0], model[1], model], False)
    loaded: Any = wrapped(on_meta(lambda: nn.Linear(2, 2)), state_dict=nn.Linear(2, 2).state_dict())
    assert loaded.seen[1] is True


def test_a_reset_that_fails_on_one_rank_is_told_of_on_every_rank(on_ranks: Callable[..., list[Any]]) -> None:
    class Reads(nn.Linear):
        def reset_parameters(self) -> None:
            if core.rank() == 1 and not self.weight.is_meta:
                raise OSError("no file")
            nn.init.ones_(self.weight)
            nn.init.zeros_(self.bias)

    def work() -> Any:
        return wrapped(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Reads(2, 2))))

    found = on_ranks(work)
    assert found[0] == found[1]
    kind, message = found[0]
    assert kind == "WrapError"
    assert message.startswith("rank 1 of 2: reset_parameters of '1' (Reads) failed with OSError: no file")
