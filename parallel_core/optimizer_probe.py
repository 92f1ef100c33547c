"""What an optimizer of torch's keeps of a parameter, found by a step on a tiny parameter of no model."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch


class Kind(Enum):
    """What stands under a key: a tensor of the parameter's own shape, one number, or anything else."""

    LIKE_PARAMETER = "like the parameter"
    NUMBER = "a number"
    OTHER = "other"


def kept_state(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], dimensions: int) -> dict[str, Kind]:
    """Return what the state of a parameter must have for the next step, by its keys; nothing where none can be said.

    Args:
        optimizer: any; nothing is said of one that is not torch's own, which may do more in a step than step. It is
            left as it is, and none of its hooks runs.
        options: those of the parameter's group.
        dimensions: how many the parameter has: Adafactor keeps other state of a matrix than of a vector.
    """
    if not is_of_torch(optimizer):
        return {}
    probe = copy.copy(optimizer)
    try:
        with torch.no_grad(), torch.device("cpu"):  # whatever the default device is
            parameter = torch.zeros((2,) * dimensions, requires_grad=True)
            parameter.grad = torch.zeros_like(parameter)
            probe.state = defaultdict(dict)
            probe.param_groups = [{**options, "params": [parameter]}]
            inspect.unwrap(type(optimizer).step)(probe)
    except Exception:  # it wants a closure, sparse gradients, or an accelerator
        return {}
    return {key: _kind(value, parameter) for key, value in probe.state.get(parameter, {}).items()}


def gained_options(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> set[str]:
    """Return the names of what a group saved by an older torch lacks, and torch's own load does without.

    Args:
        optimizer: any; nothing is said of one that is not torch's own. It is left as it is.
        options: those of the saved group.
    """
    if not is_of_torch(optimizer):
        return set()
    probe = copy.copy(optimizer)
    group = {**options, "params": []}
    try:
        probe.__setstate__({"state": defaultdict(dict), "param_groups": [group]})
    except Exception:  # it is another optimizer's
        return set()
    return set(group) - set(options)


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether an optimizer is torch's own: of any other, nobody knows what its options and its state may be."""
    return getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)


def _kind(value: Any, parameter: torch.Tensor) -> Kind:
    if isinstance(value, torch.Tensor) and value.dim():
        return Kind.LIKE_PARAMETER if value.shape == parameter.shape else Kind.OTHER
    return Kind.NUMBER if isinstance(value, float | int | torch.Tensor) else Kind.OTHER
