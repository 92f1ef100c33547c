"""Which modules become units."""

# mypy: disable-error-code="empty-body, no-any-return"
# The models below are torch's to call, which is typed in part, or never called at all.

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy

from parallel_core.units import (
    Unit,
    choose_units,
    describe_no_units,
    layer_problems,
    root_unit,
    tied_parameters,
)


class Block(nn.Module):
    """208 parameters: 8 * 8 + 8, twice, and 64 of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Transformer(nn.Module):
    """Blocks in a ModuleList between an embedding and a head of 88 parameters each."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def names(model: nn.Module, min_params: int) -> list[str]:
    return [unit.name for unit in choose_units(model, min_params)]


def parameters_of(units: list[Unit]) -> dict[str, list[str]]:
    return {unit.name: list(unit.parameters) for unit in units}


def check_partition(model: nn.Module, min_params: int) -> None:
    """Every parameter is in exactly one unit or in the root, and under its first name."""
    units = choose_units(model, min_params)
    everywhere = [name for unit in (*units, root_unit(model, units)) for name in unit.parameters]
    assert sorted(everywhere) == sorted(name for name, _ in model.named_parameters())
    assert len(set(everywhere)) == len(everywhere)
    order = [name for name, _ in model.named_modules()]
    assert [unit.name for unit in units] == sorted((unit.name for unit in units), key=order.index)
    for unit in units:
        assert unit.name
        assert unit.parameters
        assert model.get_submodule(unit.name) is unit.module
        assert unit.numel == sum(parameter.numel() for parameter in unit.parameters.values())
        assert unit.numel >= min_params


def test_a_model_with_blocks_above_the_threshold_has_one_unit_a_block() -> None:
    assert names(Transformer(), 200) == ["blocks.0", "blocks.1", "blocks.2"]


def test_the_threshold_itself_is_enough() -> None:
    assert names(Transformer(), 208) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(Transformer(), 209) == []


def test_parameters_in_an_inner_unit_do_not_count_for_the_outer_one() -> None:
    units = choose_units(Transformer(), 72)
    # Of a block 64 parameters are left when its Linears are units; that is too few.
    assert [unit.name for unit in units if "blocks.0" in unit.name] == ["blocks.0.up", "blocks.0.down"]
    units = choose_units(Transformer(), 64)
    assert [unit.name for unit in units if "blocks.0" in unit.name] == ["blocks.0", "blocks.0.up", "blocks.0.down"]
    assert parameters_of(units)["blocks.0"] == ["blocks.0.scale"]


def test_the_whole_model_is_the_root_and_never_a_unit() -> None:
    model = Transformer()
    units = choose_units(model, 200)
    root = root_unit(model, units)
    assert (root.name, root.module) == ("", model)
    assert list(root.parameters) == ["embed.weight", "head.weight"]
    assert choose_units(nn.Linear(100, 100), 1) == []


def test_with_0_every_module_with_parameters_of_its_own_is_a_unit() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.Dropout()), Block())
    assert names(model, 0) == ["0", "2.0", "3", "3.up", "3.down"]


@pytest.mark.parametrize("min_params", [0, 1, 64, 72, 88, 200, 208, 400, 10_000])
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_is_in_one_unit_or_in_the_root(min_params: int, *, tied: bool) -> None:
    check_partition(Transformer(tied=tied), min_params)


@pytest.mark.parametrize(
    "container",
    [lambda: nn.ModuleList([Block(), Block()]), lambda: nn.ModuleDict({"a": Block(), "b": Block()})],
    ids=["ModuleList", "ModuleDict"],
)
def test_a_container_without_forward_is_never_a_unit(container: Callable[[], nn.Module]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = container()

        def forward(self, x: Tensor) -> Tensor: ...  # never called

    assert names(Model(), 300) == []
    assert all(name != "parts" for name in names(Model(), 0))


def test_a_parameter_list_is_left_to_the_module_that_reads_it() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(torch.ones(50)) for _ in range(4)])

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weights[0]

    model = nn.Sequential(Reader(), nn.Linear(2, 2))
    assert parameters_of(choose_units(model, 100)) == {"0": [f"0.weights.{index}" for index in range(4)]}
    assert "0.weights" not in names(model, 0)


def test_a_module_whose_forward_was_put_on_the_instance_has_one() -> None:
    part = nn.Module()
    part.weight = nn.Parameter(torch.ones(50))
    model = nn.Sequential(part)
    assert names(model, 10) == []
    part.forward = lambda x: x * part.weight  # as some libraries patch it
    assert names(model, 10) == ["0"]


@pytest.mark.parametrize("min_params", [0, 1, 100])
def test_a_part_of_an_attention_is_never_a_unit_and_the_whole_may_be(min_params: int) -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    assert names(model, min_params)[0] == "0"
    assert "0.out_proj" not in names(model, min_params)
    check_partition(model, min_params)


@pytest.mark.parametrize("min_params", [0, 1, 100])
def test_a_part_of_a_transformer_encoder_layer_is_never_a_unit_and_the_whole_may_be(min_params: int) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 4))
    expected = ["0.layers.0", "0.layers.1", *(["1"] if min_params < 36 else [])]
    assert names(model, min_params) == expected
    check_partition(model, min_params)


def test_a_subclass_of_such_a_module_is_held_to_the_same_rule() -> None:
    class MyAttention(nn.MultiheadAttention):
        pass

    assert names(nn.Sequential(MyAttention(8, 2)), 0) == ["0"]


def test_a_model_that_is_such_a_module_has_no_units() -> None:
    assert choose_units(nn.MultiheadAttention(8, 2), 0) == []


def test_tied_parameters_of_siblings_go_to_the_root() -> None:
    model = Transformer(tied=True)
    units = choose_units(model, 80)
    assert not {"embed", "head"} & {unit.name for unit in units}
    assert "embed.weight" in root_unit(model, units).parameters
    check_partition(model, 80)


def test_tied_parameters_go_to_the_nearest_unit_that_holds_all_of_their_places() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8)
            self.second.weight = self.first.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    model = nn.Sequential(Pair(), nn.Linear(8, 8))
    assert parameters_of(choose_units(model, 60)) == {
        "0": ["0.first.weight", "0.first.bias", "0.second.bias"],
        "1": ["1.weight", "1.bias"],
    }
    for min_params in (0, 1, 60, 80, 81):
        check_partition(model, min_params)


def test_what_is_not_tied_in_a_module_with_a_tied_parameter_may_still_be_in_units() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = nn.Linear(8, 8, bias=False)
            self.own = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor: ...  # never called

    first, second = Half(), Half()
    second.shared.weight = first.shared.weight
    model = nn.Sequential(first, second)
    assert names(model, 60) == ["0.own", "1.own"]
    assert list(root_unit(model, choose_units(model, 60)).parameters) == ["0.shared.weight"]


def test_a_parameter_with_two_names_in_one_module_is_counted_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.ones(60))
            self.two = self.one

        def forward(self, x: Tensor) -> Tensor:
            return x * self.one * self.two

    model = nn.Sequential(Twice())
    assert parameters_of(choose_units(model, 60)) == {"0": ["0.one"]}
    assert choose_units(model, 61) == []
    assert tied_parameters(model) == [("0.one", "0.two")]


def test_a_module_that_stands_in_two_places_is_never_a_unit() -> None:
    """A wrapper is put into one of them; in the other the bare module would run on parameters that are not there."""
    shared = nn.Linear(8, 8)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(shared, nn.Linear(8, 8))
            self.right = nn.Sequential(shared, nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor: ...  # never called

    model = Model()
    for min_params in (0, 1, 60):
        units = choose_units(model, min_params)
        assert [unit.name for unit in units] == ["left.1", "right.1"]
        assert list(root_unit(model, units).parameters) == ["left.0.weight", "left.0.bias"]


def test_a_module_that_stands_twice_in_one_place_goes_to_that_unit() -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(nn.Sequential(layer, nn.ReLU(), layer), nn.Linear(2, 2))
    assert parameters_of(choose_units(model, 60)) == {"0": ["0.0.weight", "0.0.bias"]}


def test_what_is_inside_a_module_that_stands_in_two_places_is_no_unit_either() -> None:
    block = Block()
    model = nn.Sequential(nn.Sequential(block), nn.Sequential(block), nn.Linear(8, 8))
    assert names(model, 60) == ["2"]


def test_modules_that_are_asked_for_become_units_whatever_their_size() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    units = choose_units(model, 1000, always=lambda module: isinstance(module, nn.BatchNorm1d))
    assert parameters_of(units) == {"1": ["1.weight", "1.bias"]}


def test_a_module_that_is_asked_for_is_held_to_the_same_rules() -> None:
    norm = nn.BatchNorm1d(8)
    model = nn.Sequential(nn.Sequential(norm), nn.Sequential(norm), nn.ModuleList([nn.Linear(2, 2)]), nn.ReLU())
    assert choose_units(model, 1000, always=lambda module: not isinstance(module, nn.Sequential | nn.Linear)) == []


def test_units_are_chosen_on_the_meta_device_as_elsewhere() -> None:
    with torch.device("meta"):
        on_meta = Transformer(tied=True)
    for min_params in (0, 64, 100, 208):
        assert names(on_meta, min_params) == names(Transformer(tied=True), min_params)


def test_choosing_changes_nothing() -> None:
    model = Transformer(tied=True)
    before = {name: (id(value), value._version) for name, value in model.named_parameters(remove_duplicate=False)}
    modules = [(name, id(module)) for name, module in model.named_modules()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    choose_units(model, 64)
    assert modules == [(name, id(module)) for name, module in model.named_modules()]
    assert attributes == [sorted(vars(module)) for module in model.modules()]
    assert before == {
        name: (id(value), value._version) for name, value in model.named_parameters(remove_duplicate=False)
    }


@pytest.mark.parametrize("model", [nn.Tanh(), nn.Sequential(), nn.Sequential(nn.ReLU(), nn.Dropout())])
def test_a_model_without_parameters_has_no_units(model: nn.Module) -> None:
    assert choose_units(model, 0) == []
    assert root_unit(model, []).numel == 0


def test_frozen_parameters_count_as_the_others() -> None:
    assert names(Transformer().requires_grad_(False), 200) == ["blocks.0", "blocks.1", "blocks.2"]


class Wrapped(nn.Module):
    """Stands for FullyShardedDataParallel where torch's own policy is asked."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.inner = module


def torchs_units(model: nn.Module, min_params: int) -> list[str]:
    """Return the modules that torch's size-based policy wraps."""
    name_of = {module: name for name, module in model.named_modules()}
    _recursive_wrap(
        model,
        lambda module, recurse, nonwrapped_numel: size_based_auto_wrap_policy(
            module, recurse, nonwrapped_numel, min_num_params=min_params
        ),
        Wrapped,
        set(),
        set(),
        only_wrap_children=True,
    )
    return sorted(name_of[module.inner] for module in model.modules() if isinstance(module, Wrapped))


def deep_mlp() -> nn.Module:
    generator = torch.Generator().manual_seed(0)

    def tower(depth: int) -> nn.Module:
        width = int(torch.randint(2, 12, (), generator=generator))
        if depth == 0:
            return nn.Linear(width, 8)
        parts = [tower(depth - 1) for _ in range(int(torch.randint(1, 4, (), generator=generator)))]
        return nn.Sequential(*parts, nn.ReLU(), nn.Linear(width, width))

    return tower(4)


def mixed() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 8), nn.Sequential(Block(), nn.LayerNorm(8)), nn.Bilinear(2, 3, 4))


def encoder() -> nn.Module:
    return nn.Sequential(nn.MultiheadAttention(8, 2), nn.Sequential(Block(), nn.MultiheadAttention(8, 4)))


@pytest.mark.parametrize("min_params", [1, 10, 30, 64, 65, 72, 73, 88, 100, 150, 208, 209, 300, 400, 1000, 10_000])
@pytest.mark.parametrize("make", [Transformer, deep_mlp, mixed])
def test_without_special_cases_the_answer_is_that_of_torchs_size_based_policy(
    make: Callable[[], nn.Module], min_params: int
) -> None:
    model = make()
    assert sorted(names(model, min_params)) == torchs_units(make(), min_params)


def test_the_warning_for_a_model_without_units_names_the_largest_modules_and_the_value_that_works() -> None:
    model = Transformer()
    text = describe_no_units(model, "fsdp_auto_wrap_min_params", 10_000_000)
    assert text == (
        "fsdp_auto_wrap_min_params = 10_000_000: no module has as many parameters, so the root holds them all and no "
        "memory is saved; the largest modules are 'blocks.0' (208), 'blocks.1' (208), 'blocks.2' (208): set "
        "fsdp_auto_wrap_min_params = 208 or less"
    )


class Lonely(nn.Module):
    """All its parameters are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10))
        self.parts = nn.ParameterList([nn.Parameter(torch.ones(10))])

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Nested(nn.Module):
    """An attention that is the largest module and no unit, since it is read by the one around it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor: ...  # never called


def shared_everywhere() -> nn.Module:
    layer = nn.Linear(8, 8)
    return nn.Sequential(nn.Sequential(layer, nn.Linear(2, 2)), layer)


@pytest.mark.parametrize(
    "make",
    [
        Transformer,
        lambda: Transformer(tied=True),
        deep_mlp,
        encoder,
        shared_everywhere,
        Nested,
        lambda: nn.Sequential(nn.Linear(4, 4)),
        lambda: nn.Sequential(nn.MultiheadAttention(8, 2)),
    ],
)
def test_the_value_that_the_warning_names_works(make: Callable[[], nn.Module]) -> None:
    model = make()
    assert choose_units(model, 10**9) == []
    text = describe_no_units(model, "f", 10**9)
    value = int(text.rpartition("set f = ")[2].removesuffix(" or less"))
    assert choose_units(model, value)
    assert not choose_units(model, value + 1), "a larger value would have worked"


@pytest.mark.parametrize("min_params", [0, 7])
def test_the_warning_for_a_model_that_cannot_have_units_does_not_blame_the_threshold(min_params: int) -> None:
    for model in (Lonely(), nn.Linear(2, 2), nn.Sequential(nn.ReLU()), nn.MultiheadAttention(8, 2)):
        count = sum(parameter.numel() for parameter in model.parameters())
        assert describe_no_units(model, "f", min_params) == (
            f"f = {min_params}: this model has no module that could be a unit, so the root holds all {count} "
            f"parameters and no memory is saved, whatever the value; build it of modules that are called one after "
            f"another"
        )


def test_tied_parameters_are_told_by_all_their_names() -> None:
    assert tied_parameters(Transformer(tied=True)) == [("embed.weight", "head.weight")]
    assert tied_parameters(Transformer()) == []
    layer = nn.Linear(2, 2)
    assert tied_parameters(nn.Sequential(layer, nn.Sequential(layer))) == [
        ("0.weight", "1.0.weight"),
        ("0.bias", "1.0.bias"),
    ]


def test_a_unit_is_told_by_its_name() -> None:
    assert repr(Unit("blocks.0", Block(), {})) == "Unit(name='blocks.0')"


def test_choosing_units_leaves_nothing_that_holds_the_parameters() -> None:
    """Else the whole parameters would be there as long as their shards, until the garbage collector comes by."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    gc.collect()
    gc.disable()
    try:
        assert len(choose_units(model, 10)) == 2
        del model
        assert [parameter() for parameter in parameters] == [None] * 4
    finally:
        gc.enable()


def names_of(model: nn.Module, *classes: str, min_params: int = 10**9) -> list[str]:
    return [unit.name for unit in choose_units(model, min_params, classes=classes)]


def test_a_module_of_a_class_that_is_named_is_a_unit_whole_and_others_go_by_size() -> None:
    assert names_of(Transformer(), "Block") == ["blocks.0", "blocks.1", "blocks.2"]
    assert names_of(Transformer(), "Block", min_params=0) == ["embed", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_named_classes_may_nest() -> None:
    parts = [f"blocks.{index}{part}" for index in range(3) for part in ("", ".up", ".down")]
    assert names_of(Transformer(), "Block", "Linear") == [*parts, "head"]


def test_the_root_is_no_unit_though_its_class_is_named() -> None:
    assert names_of(Transformer(), "Transformer") == []
    assert names_of(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), "Sequential") == ["0"]


def test_a_compiled_module_goes_by_the_class_inside_and_its_wrapper_is_the_unit() -> None:
    model = Transformer()
    compiled: Any = torch.compile(model.blocks[1], backend="eager")
    model.blocks.register_module("1", compiled)
    units = choose_units(model, 10**9, classes=("Block",))
    assert [unit.name for unit in units] == ["blocks.0", "blocks.1", "blocks.2"]
    assert units[1].module is compiled
    inside = [f"blocks.1._orig_mod.{part}" for part in ("up", "down")]
    assert [name for name in names(model, 64) if name.startswith("blocks.1")] == ["blocks.1", *inside]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("Blok", "its classes are 'Block', 'Embedding', 'Linear', 'ModuleList'; did you mean 'Block'?"),
        ("ModuleList", "names 'ModuleList', and 'blocks' can't be a unit"),
        ("Linear", "names 'Linear', and 'head' can't be a unit"),
    ],
)
def test_a_class_that_cannot_be_honoured_is_a_problem_by_name(wanted: str, text: str) -> None:
    (found,) = layer_problems(Transformer(tied=True), (wanted,), "mine_wrap_layers")
    assert found.startswith("mine_wrap_layers names ")
    assert text in found


def test_a_class_without_parameters_is_a_problem_and_a_class_that_is_there_is_none() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    (found,) = layer_problems(model, ("ReLU", "Linear"), "mine_wrap_layers")
    assert found == "mine_wrap_layers names 'ReLU', and no module of this class has parameters; leave it out"
