"""The bare model's names: what a wrapper adds is taken out by the module that stands there, never by the text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_core.names import bare_modules, bare_names, uncompiled


def compiled(module: nn.Module) -> nn.Module:
    wrapper = torch.compile(module, backend="aot_eager")  # nothing is compiled before the first forward
    assert isinstance(wrapper, nn.Module)
    return wrapper


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


class Tower(nn.Module):
    """A user's own children with the names that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.ModuleDict({"_orig_mod": nn.Linear(2, 2), "_fsdp_wrapped_module": nn.Linear(2, 2)})
        self._orig_mod = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Around(nn.Module):
    """A strategy's wrapper: what it wraps is its child `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def is_around(module: nn.Module, child: str) -> bool:
    return isinstance(module, Around) and child == "module"


def state_names(model: nn.Module, *, around: bool = False) -> list[str]:
    bare = bare_names(model, is_around) if around else bare_names(model)
    return [bare(name) for name in model.state_dict()]


def test_the_names_of_a_bare_model_stay_as_they_are() -> None:
    for model in (small(), Tower(), nn.Sequential(Tower(), small()), nn.Linear(2, 2)):
        assert state_names(model) == list(model.state_dict())


def test_a_users_own_children_keep_the_names_that_wrappers_use() -> None:
    assert state_names(Tower()) == [
        "module._orig_mod.weight",
        "module._orig_mod.bias",
        "module._fsdp_wrapped_module.weight",
        "module._fsdp_wrapped_module.bias",
        "_orig_mod.weight",
        "_orig_mod.bias",
    ]


def test_the_wrapper_of_compile_around_a_model_adds_nothing() -> None:
    for make in (small, Tower):
        assert state_names(compiled(make())) == list(make().state_dict())


def test_compiled_parts_add_nothing() -> None:
    model = nn.Sequential(compiled(small()), small(), compiled(Tower()))
    expected = list(nn.Sequential(small(), small(), Tower()).state_dict())
    assert list(model.state_dict()) != expected
    assert state_names(model) == expected


def test_a_compiled_model_with_compiled_parts_adds_nothing() -> None:
    model = compiled(nn.Sequential(compiled(small()), nn.Sequential(compiled(small()))))
    assert state_names(model) == list(nn.Sequential(small(), nn.Sequential(small())).state_dict())


def test_compiling_in_place_adds_nothing() -> None:
    model = small()
    model[0].compile(backend="aot_eager")
    assert state_names(model) == list(small().state_dict())


def test_a_strategys_wrappers_are_told_by_its_own_test() -> None:
    model = Around(nn.Sequential(Around(Tower()), compiled(Around(small()))))
    assert state_names(model, around=True) == list(nn.Sequential(Tower(), small()).state_dict())


def test_buffers_and_parameters_right_below_a_wrapper_are_renamed() -> None:
    model = Around(nn.BatchNorm1d(2))
    bare = bare_names(model, is_around)
    assert bare("module.running_mean") == "running_mean"
    assert bare("module.weight") == "weight"


def test_a_name_with_dots_after_the_module_keeps_them() -> None:
    """As a state-dict hook may add it."""
    bare = bare_names(Around(small()), is_around)
    assert bare("module.0.quant.scale.zero") == "0.quant.scale.zero"
    assert bare("module._extra_state") == "_extra_state"
    assert bare("elsewhere.module.x") == "elsewhere.module.x"
    assert bare("plain") == "plain"


def test_modules_are_given_with_both_paths() -> None:
    inner = small()
    model = Around(compiled(inner))
    found = [(actual, bare, type(module).__name__) for actual, bare, module in bare_modules(model, is_around)]
    assert found == [
        ("", "", "Around"),
        ("module.", "", "OptimizedModule"),
        ("module._orig_mod.", "", "Sequential"),
        ("module._orig_mod.0.", "0.", "Linear"),
        ("module._orig_mod.1.", "1.", "BatchNorm1d"),
    ]


def test_a_module_that_stands_in_two_places_is_given_for_both() -> None:
    layer = nn.Linear(2, 2)
    model = nn.Sequential(layer, nn.Sequential(layer))
    assert [bare for _, bare, module in bare_modules(model) if module is layer] == ["0.", "1.0."]
    assert state_names(model) == list(model.state_dict())


def test_a_child_that_is_none_is_passed_over() -> None:
    model = nn.Module()
    model.register_module("absent", None)
    assert [bare for _, bare, _ in bare_modules(model)] == [""]


def test_the_module_inside_compile_is_found() -> None:
    model = small()
    assert uncompiled(model) is model
    assert uncompiled(compiled(model)) is model


def test_a_users_child_or_a_forwarded_attribute_is_not_taken_for_what_was_compiled() -> None:
    class Forwarding(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    tower, forwarding = Tower(), Forwarding(compiled(small()))
    assert hasattr(forwarding, "_orig_mod")
    assert uncompiled(tower) is tower
    assert uncompiled(forwarding) is forwarding


def test_a_copy_of_a_compiled_model_is_seen_through_as_well() -> None:
    model = compiled(small())
    assert uncompiled(copy.deepcopy(model)) is not uncompiled(model)
    assert state_names(copy.deepcopy(model)) == list(small().state_dict())


@pytest.mark.parametrize("shared", [False, True])
def test_tied_parameters_keep_all_their_names(*, shared: bool) -> None:
    first = nn.Linear(2, 2)
    second = first if shared else nn.Linear(2, 2)
    second.weight = first.weight
    model = Around(nn.Sequential(first, second))
    bare = bare_names(model, is_around)
    names = [bare(name) for name, _ in model.named_parameters(remove_duplicate=False)]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]
