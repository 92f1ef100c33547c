"""An optimizer's state by the bare model's parameter names, instead of by the positions that torch uses.

The layout is that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`:
`{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], option: value, ...}]}`. That function itself
is not used: for an optimizer that has not stepped it calls `step()`, which changes the run.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from parallel_core.errors import StateDictError
from parallel_core.hookspecs import StateDictType
from parallel_core.optimizer_probe import is_of_torch
from parallel_core.tensors import entry, is_dtensor

__all__ = [
    "check_copies",
    "check_has_names",
    "load_named_state",
    "named_groups",
    "optimizer_told",
    "options_told",
    "required_groups",
    "sharded_entries",
]


def named_groups(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups with names for parameters.

    Args:
        optimizer: whose groups.
        parameters: the model's parameters by name.

    Raises:
        StateDictError: it is no optimizer, or it holds a parameter that is not among them.
    """
    name_of = _names_of(optimizer, parameters)
    return [
        {
            key: [name_of[parameter] for parameter in value] if key == "params" else copy.deepcopy(value)
            for key, value in group.items()
            if key != "param_names"  # torch's own names, where named_parameters() was passed: they are the wrapper's
        }
        for group in optimizer.param_groups
    ]


def _names_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[torch.Tensor, str]:
    """Return the names of the model's parameters; refuses an optimizer that holds others, as `named_groups` says."""
    if not hasattr(optimizer, "param_groups"):  # one of a user's own need not be torch's
        raise StateDictError(f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    name_of = {parameter: name for name, parameter in parameters.items()}
    strangers = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in name_of]
    if strangers:
        raise StateDictError(
            f"the optimizer holds {len(strangers)} parameters that are not the model's (the first has the shape "
            f"{list(strangers[0])}); make the optimizer from the parameters of the wrapped model"
        )
    return name_of


def check_has_names(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer of whose state something would be lost.

    Raises:
        StateDictError: it keeps state under a key that is no parameter.
    """
    states: Mapping[Any, Any] = optimizer.state
    if nameless := [key for key, values in states.items() if values and not isinstance(key, torch.Tensor)]:
        raise StateDictError(
            f"{type(optimizer).__name__} keeps state under {nameless[0]!r}, which is no parameter, and so has no name "
            f"in a state dict; keep it under a parameter, or among the options of a group"
        )


def check_copies(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse an optimizer that has an option or a value that can't be copied, before other ranks wait for this one.

    Raises:
        StateDictError: it has one.
    """
    named_groups(optimizer, parameters)
    for parameter in parameters.values():
        for value in optimizer.state.get(parameter, {}).values():
            if not isinstance(value, torch.Tensor):
                entry(value, StateDictType.SHARDED)


def optimizer_told(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return in words what must be alike on all ranks: the kind, and the place of each of the model's parameters.

    Raises:
        StateDictError: as `named_groups`.
    """
    names = _names_of(optimizer, parameters)
    told = {"the optimizer": type(optimizer).__name__}
    told |= {f"the place of {name!r} in the optimizer": "none" for name in parameters}
    for index, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            told[f"the place of {names[parameter]!r} in the optimizer"] = f"{place} of group {index}"
    return told


def options_told(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return in words the numbers in the options of an optimizer's groups; nothing of one that is not torch's own.

    Another one may have options that are a rank's own: a seed, a device.
    """
    if not is_of_torch(optimizer):
        return {}
    return {
        f"{key!r} of the optimizer's group {index}": ", ".join(str(float(number)) for number in numbers)
        for index, group in enumerate(optimizer.param_groups)
        for key in optimizer.defaults
        if (numbers := _numbers(group.get(key)))
    }


def _numbers(value: Any) -> list[Any]:
    values = list(value) if isinstance(value, tuple | list) else [value]
    are_numbers = all(isinstance(v, int | float) or (isinstance(v, torch.Tensor) and v.numel() == 1) for v in values)
    return values if are_numbers else []


def sharded_entries(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the names of what an optimizer has as DTensors: putting one together takes all ranks."""
    return tuple(
        f"{key!r} of {name!r}"
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if is_dtensor(value)
    )


def required_groups(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Return the groups that a state to be loaded must have: `named_groups`, without what others have put into them.

    Schedulers keep values of their own there (`initial_lr`), which a state has that was saved with the same scheduler.
    """
    return [
        {key: value for key, value in group.items() if key == "params" or key in optimizer.defaults}
        for group in named_groups(optimizer, parameters)
    ]


def load_named_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, torch.Tensor],
    state: Mapping[str, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    """Replace an optimizer's state and its groups' options; the values must already be where they are to stay.

    Args:
        optimizer: the optimizer; its groups must hold the same parameters as `groups` in the same order.
        parameters: the model's parameters by name.
        state: the values for this rank, by parameter name.
        groups: the saved groups, by name, as `named_groups` makes them.
    """
    name_of = {parameter: name for name, parameter in parameters.items()}
    # torch's own load_state_dict goes by position; it runs the optimizer's load hooks and moves step counts to where
    # the optimizer wants them.
    positions: dict[str, int] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            positions[name_of[parameter]] = len(positions)
    own_groups = [
        {**group, **saved, "params": [positions[name_of[parameter]] for parameter in group["params"]]}
        | ({"param_names": group["param_names"]} if "param_names" in group else {})
        for group, saved in zip(optimizer.param_groups, groups, strict=True)
    ]
    own_state = {positions[name]: values for name, values in state.items()}
    optimizer.load_state_dict({"state": own_state, "param_groups": own_groups})
    # It also casts state to the parameter's dtype, which not every optimizer keeps it in: averages in fp32, say, of
    # weights in bf16. Step counts are where the optimizer wants them. Lists and dicts it casts as a whole, integers in
    # them too, and of a text it makes a generator.
    for name, values in state.items():
        loaded, device = optimizer.state[parameters[name]], parameters[name].device
        for key, value in values.items():
            if isinstance(value, str | list | tuple | dict):
                loaded[key] = tree_map_only(torch.Tensor, lambda each: each.to(device), copy.deepcopy(value))  # noqa: B023  # called at once
            elif key != "step" and isinstance(value, torch.Tensor) and loaded[key].dtype != value.dtype:
                loaded[key] = value.to(loaded[key].device)
