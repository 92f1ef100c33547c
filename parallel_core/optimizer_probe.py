"""Which keys an optimizer of torch's keeps of a parameter, found by a step on a tiny parameter of no model."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch


def kept_keys(optimizer: torch.optim.Optimizer, options: Mapping[str, Any], dimensions: int) -> frozenset[str]:
    """Return the keys that the state of a parameter must have for the next step; none where nothing can be said.

    Args:
        optimizer: any; nothing is said of one that is not torch's own, which may do more in a step than step. It is
            left as it is, and none of its hooks runs.
        options: those of the parameter's group.
        dimensions: how many the parameter has: Adafactor keeps other state of a matrix than of a vector.
    """
    if getattr(torch.optim, type(optimizer).__name__, None) is not type(optimizer):
        return frozenset()
    parameter = torch.zeros((2,) * dimensions, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    probe = copy.copy(optimizer)
    probe.state = defaultdict(dict)
    probe.param_groups = [{**options, "params": [parameter]}]
    try:
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(probe)
    except Exception:  # it wants a closure, sparse gradients, or an accelerator
        return frozenset()
    return frozenset(probe.state.get(parameter, {}))
