"""Whether an optimizer's state dict fits, found before any tensor moves, and agreed on by all ranks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from parallel_core import ranks
from parallel_core.hookspecs import StateDictType
from parallel_core.optimizer_probe import Kind, gained_options, is_of_torch, kept_state
from parallel_core.optimizer_state import required_groups
from parallel_core.outlines import on_meta, outlined, sent, unsendable
from parallel_core.record import Layout, TensorSpec
from parallel_core.state_dicts import Verdict, agree_on, describe, entries_number, named, verdict_of
from parallel_core.tensors import is_dtensor

Groups = Sequence[Mapping[str, Any]]
Kept = Sequence[tuple[str, dict[str, Kind]]]  # by the parameter's name and the key


class Wanted(NamedTuple):
    """What a state dict is to be loaded into.

    Attributes:
        layout: the model's.
        optimizer: the optimizer, on this rank.
        parameters: those of the model by name, as this rank has them.
    """

    layout: Layout
    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, torch.Tensor]


def check_optimizer_state_dict(wanted: Wanted, state_dict: Any, state_dict_type: StateDictType) -> dict[str, Any]:
    """Agree on whether an optimizer's state dict fits; a collective.

    Args:
        wanted: what it is to fit.
        state_dict: the dict to load, as `optimizer_state_dict` returns it.
        state_dict_type: under `full` rank 0's dict counts.

    Returns:
        the state dict, of the same structure on every rank, with meta tensors off rank 0 under `full`.

    Raises:
        StateDictError: it does not fit; the same error on every rank.
    """
    verdict = verdict_of(state_dict_type, lambda: _judge(wanted, state_dict, state_dict_type))
    agree_on(verdict, strict=True, of_what="optimizer")
    if state_dict_type is StateDictType.FULL and ranks.world_size() > 1:
        outline = sent(_mapped(wanted.layout, state_dict, outlined) if ranks.rank() == 0 else None)
        if ranks.rank():
            return _mapped(wanted.layout, outline, on_meta)
    return _mapped(wanted.layout, state_dict, lambda value: value)


def _judge(wanted: Wanted, state_dict: Any, state_dict_type: StateDictType) -> Verdict:
    found = list(optimizer_problems(wanted, state_dict))
    state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
    if isinstance(state, Mapping) and all(isinstance(values, Mapping) for values in state.values()):
        found += _value_problems(state, state_dict_type)
    if not found:
        found += unsendable("'param_groups'", state_dict["param_groups"], state_dict_type)
    if found:
        return Verdict([], [], found)
    entries = [
        (name, key, is_dtensor(value)) for name, values in state_dict["state"].items() for key, value in values.items()
    ]
    return Verdict([], [], [], entries_number(sorted(entries), state_dict_type))


def optimizer_problems(wanted: Wanted, state_dict: Any) -> Iterator[str]:
    """Yield what keeps a state dict from being that of such an optimizer, a line each.

    Of the tensors in it the shapes alone are looked at.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        keys = f" with {sorted(map(str, state_dict))}" if isinstance(state_dict, Mapping) else ""
        yield f"expected a dict with 'state' and 'param_groups', found {describe(state_dict)}{keys}"
        return
    state, saved = state_dict["state"], state_dict["param_groups"]
    if not isinstance(saved, list | tuple) or not all(isinstance(g, Mapping) and "params" in g for g in saved):
        yield f"'param_groups': expected a list of dicts that have 'params', found {saved!r:.80}"
        return
    if not isinstance(state, Mapping) or not all(isinstance(values, Mapping) for values in state.values()):
        yield f"'state': expected a dict of each parameter's values, found {state!r:.80}"
        return
    if any(isinstance(name, int) for group in saved for name in group["params"]):
        yield "parameters stand by their positions, as torch itself saves them; optimizer_state_dict saves their names"
        return
    layout, groups = wanted.layout, required_groups(wanted.optimizer, wanted.parameters)
    unknown = [str(name) for name in state if name not in layout.parameters]
    if unknown:
        yield named("state of parameters that the model lacks", unknown)
    group_problems = list(_group_problems(wanted.optimizer, groups, saved))
    yield from group_problems
    if not is_of_torch(wanted.optimizer):
        return
    told = dict(_shape_problems(layout, state))
    if not group_problems:
        kept = list(_kept(wanted, saved, state))
        option_problems = list(_option_problems(groups, saved))
        yield from option_problems
        yield from _missed(wanted.optimizer, kept, state)
        if not option_problems:
            told |= {where: text for where, text in _kind_problems(layout, kept, state) if where not in told}
    yield from (f"{where}: {text}" for where, text in told.items())


def _group_problems(optimizer: torch.optim.Optimizer, own: Groups, saved: Groups) -> Iterator[str]:
    if len(own) != len(saved):
        yield f"the optimizer has {len(own)} parameter groups, the state dict {len(saved)}; make the same groups"
        return
    for index, (group, other) in enumerate(zip(own, saved, strict=True)):
        lacking = [name for name in group["params"] if name not in other["params"]]
        extra = [name for name in other["params"] if name not in group["params"]]
        if lacking:
            yield named(f"group {index} of the state dict lacks parameters that the optimizer's has", lacking)
        if extra:
            yield named(f"group {index} of the state dict has parameters that the optimizer's lacks", extra)
        if options := [key for key in group if key not in other]:
            gained = gained_options(optimizer, other)
            options = [key for key in options if key not in gained]
        if options:
            yield named(f"group {index} of the state dict lacks options; it is another kind of optimizer's", options)


def _option_problems(own: Groups, saved: Groups) -> Iterator[str]:
    for index, (group, other) in enumerate(zip(own, saved, strict=True)):
        for key in (key for key in group if key in other):
            if _is_number(group[key]) and not _is_number(other[key]):
                yield f"group {index}, {key!r}: expected a number, found {other[key]!r:.80}"
            elif key != "params" and _are_numbers(group[key]) and not _are_numbers(other[key], len(group[key])):
                yield f"group {index}, {key!r}: expected {len(group[key])} numbers, found {other[key]!r:.80}"


def _missed(optimizer: torch.optim.Optimizer, kept: Kept, state: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield what the next step would look for and not find."""
    lacking: dict[frozenset[str], list[str]] = {}
    for name, kinds in kept:
        if missing := frozenset(kinds).difference(state[name]):
            lacking.setdefault(missing, []).append(name)
    for keys, names in lacking.items():
        yield named(
            f"state without {', '.join(map(repr, sorted(keys)))}, which {type(optimizer).__name__} keeps; it is "
            f"another optimizer's, or from a strategy that shows parameters in other shapes",
            names,
        )


def _kind_problems(layout: Layout, kept: Kept, state: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield what the next step could not compute with: where it stands, and what is wrong."""
    for name, kinds in kept:
        for key, kind in kinds.items():
            value = state[name].get(key)
            if key in state[name] and (expected := _expected(kind, value, layout.entries.get(name), key)):
                found = describe(value) if isinstance(value, torch.Tensor) else f"{value!r:.80}"
                yield f"{name!r}, {key!r}", f"expected {expected}, found {found}"


def _kept(
    wanted: Wanted, saved: Groups, state: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, dict[str, Kind]]]:
    """Yield the parameters that have been stepped with, and what the optimizer keeps of each with saved options."""
    kept: dict[tuple[int, int], dict[str, Kind]] = {}
    for index, (own, other) in enumerate(zip(wanted.optimizer.param_groups, saved, strict=True)):
        for name in other["params"]:
            if state.get(name):
                which = index, wanted.parameters[name].dim()
                if which not in kept:
                    kept[which] = kept_state(wanted.optimizer, {**own, **other}, which[1])
                yield name, kept[which]


def _expected(kind: Kind, value: Any, spec: TensorSpec | None, key: str) -> str:
    """Return what should stand in the place of a value of the state, or nothing if it may stand there."""
    if value is None and key == "momentum_buffer":
        return ""  # it stands for the first step with momentum
    if kind is Kind.NUMBER:
        return "" if _is_number(value) else "a number"
    if kind is not Kind.LIKE_PARAMETER or spec is None:
        return ""
    fits = isinstance(value, torch.Tensor) and tuple(value.shape) == spec.shape
    if fits and value.is_floating_point() == spec.dtype.is_floating_point:
        return ""
    return f"a tensor like the parameter, {spec}"


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    is_number = isinstance(value, numbers.Number) and not isinstance(value, bool)
    return is_number and not (isinstance(value, float) and math.isnan(value))


def _are_numbers(value: Any, count: int | None = None) -> bool:
    is_sequence = isinstance(value, list | tuple) and len(value) > 0 and count in (None, len(value))
    # One of Adafactor's may be None, and of others each is a number.
    return is_sequence and all(each is None or _is_number(each) for each in value)


def _shape_problems(layout: Layout, state: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    # L-BFGS keeps all that it has, about all parameters laid end to end, under the first of them.
    is_per_parameter = len(state) > 1 or len(layout.parameters) == 1
    for name, values in state.items():
        spec = layout.entries.get(name) if name in layout.parameters else None
        if spec is None:
            continue  # told of already, or a state dict's hook leaves it out
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and is_per_parameter and not _fits(tuple(value.shape), spec.shape):
                where = f"{name!r}, {key!r}"
                yield where, f"wrong shape: the model's parameter is {spec}, the state {describe(value)}"


def _value_problems(state: Mapping[str, Mapping[str, Any]], state_dict_type: StateDictType) -> Iterator[str]:
    for name, values in state.items():
        for key, value in values.items():
            where = f"{name!r}, {key!r}"
            if not isinstance(value, torch.Tensor):
                yield from unsendable(where, value, state_dict_type)
            elif is_dtensor(value) and state_dict_type is StateDictType.FULL:
                yield f"{where}: found a DTensor in a full state dict; pass state_dict_type='sharded'"
            elif value.layout is not torch.strided:
                yield f"{where}: found a sparse tensor; make it dense"
            elif value.is_meta:
                yield f"{where}: found a tensor on the meta device, which has no values"


def _fits(shape: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """Tell whether a value of this shape may belong to a parameter: one per element, or a mean over dimensions."""
    if len(shape) != len(parameter):
        return True
    return all(size in (1, expected) for size, expected in zip(shape, parameter, strict=True))


def _mapped(layout: Layout, state_dict: Mapping[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    """Return an optimizer's state dict in the same order on every rank, with a function applied to each value."""
    state = {
        name: {key: function(values[key]) for key in sorted(values)}
        for name in layout.parameters
        if (values := state_dict["state"].get(name)) is not None
    }
    return {"state": state, "param_groups": [dict(group) for group in state_dict["param_groups"]]}
