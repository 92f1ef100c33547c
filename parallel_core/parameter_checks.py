"""What keeps the parameters of a bare model from being cut into shards that take their place.

Part of what `sharding_checks` finds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set, ValuesView
from typing import Any

import torch
from torch import nn

from parallel_core.dtypes import dtype_name
from parallel_core.names import bare_names
from parallel_core.record import bare_state
from parallel_core.tensor_checks import memory_problems

__all__ = ["kept_elsewhere", "parameter_problems"]

_ATOMS = frozenset([int, float, str, bytes, bool, type(None)])  # of which there may be many in a list


def parameter_problems(model: nn.Module, device: torch.device, strategy: str, *, contiguous: bool) -> Iterator[str]:
    """Yield what would make cutting the parameters fail, or the training with shards go wrong, a sentence each.

    Args:
        model: the bare model.
        device: where this rank trains.
        strategy: the strategy's name, for the messages.
        contiguous: whether a parameter must be contiguous.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            yield (
                f"{name or 'the model'!r} is a ScriptModule, in which {strategy} can't put shards; wrap the Python "
                f"module that it was made of"
            )
            return
        if getattr(module, "sparse", None) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield f"{name or 'the model'!r} makes sparse gradients, and {strategy} reduces dense ones; set sparse=False"
    for name, parameter in model.named_parameters():
        yield from _problems_of_one(name, parameter, device, strategy, contiguous=contiguous)
    owned = {id(parameter): name for name, parameter in model.named_parameters()}
    for holder, attribute, name in kept_elsewhere(model, owned):
        yield (
            f"{holder or 'the model'!r} keeps parameter {name!r} in its attribute {attribute!r} too, where {strategy} "
            f"can't put its shard; reach it through the module that owns it, or use nn.ParameterList"
        )
    yield from memory_problems(model)
    yield from _state_dict_problems(model, strategy)


def _problems_of_one(
    name: str, parameter: nn.Parameter, device: torch.device, strategy: str, *, contiguous: bool
) -> Iterator[str]:
    if parameter.dim() == 0:
        yield f"parameter {name!r} has no dimensions and can't be cut into shards; give it the shape [1]"
    if not parameter.is_floating_point():
        yield (
            f"parameter {name!r} has dtype {dtype_name(parameter.dtype)}, and {strategy} shards floating point only; "
            f"make it a buffer"
        )
    elif device.type == "cpu" and parameter.dtype.itemsize == 1:
        yield (
            f"parameter {name!r} has dtype {dtype_name(parameter.dtype)}, which gloo can't send; use another dtype, or "
            f"train on a GPU"
        )
    if not parameter.numel():
        yield f"parameter {name!r} has no elements, and {strategy} can't cut it; leave it out"
    if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        yield (
            f"parameter {name!r} has a hook for its gradient, which {strategy} would drop, as another tensor takes "
            f"its place; register it after the wrap"
        )
    if contiguous and parameter.layout is torch.strided and not parameter.is_contiguous():
        yield (
            f"parameter {name!r} of shape {list(parameter.shape)} is not contiguous, and {strategy} can't cut it; "
            f"make it so: parameter.data = parameter.data.contiguous()"
        )
    if parameter.device.type not in ("cpu", "meta", device.type):
        yield f"parameter {name!r} lies on {parameter.device}, and this rank trains on {device}; move it there"


def kept_elsewhere(model: nn.Module, owned: Mapping[int, str]) -> Iterator[tuple[str, str, str]]:
    """Yield where modules keep things beside the place that torch knows of: what stands there later is what it was.

    Attributes are looked at, what lies in them in containers, however deep, and the attributes of objects in them. What
    a function has closed over can't be seen.

    Args:
        model: the bare model.
        owned: the names to yield for the parameters or modules to look for, by their `id`.

    Yields:
        the name of the module, that of its attribute, and the first of the names found in it.
    """
    known = vars(nn.Module())
    for name, module in model.named_modules():
        kind: Any = type(module)
        if kind.__setattr__ is not nn.Module.__setattr__:
            continue  # told of each parameter that is set, as torch's recurrent layers are, who keep a list up to date
        for attribute, value in vars(module).items():
            if attribute in known:
                continue
            found = next((owned[id(item)] for item in _reached(value) if id(item) in owned), None)
            if found is not None:
                yield name, attribute, found


def _reached(value: object) -> Iterator[object]:
    """Yield what lies in a value of an attribute, in containers and in the attributes of objects that lie there."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        item = waiting.pop()
        yield item
        if type(item) in _ATOMS or id(item) in seen or isinstance(item, torch.Tensor | nn.Module | type):
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            waiting.extend(item.values())
        elif isinstance(item, list | tuple | Set | ValuesView):
            waiting.extend(item)
        else:
            # No deeper: from a trainer, say, everything can be reached.
            yield from getattr(item, "__dict__", {}).values()


def _state_dict_problems(model: nn.Module, strategy: str) -> Iterator[str]:
    bare, state = bare_names(model), bare_state(model)
    lacking = next((name for name, _ in model.named_parameters() if bare(name) not in state), None)
    if lacking is not None:
        yield (
            f"the state dict of the model has no {bare(lacking)!r}, which is a parameter: a hook, or an override of "
            f"state_dict, drops or renames it, and {strategy} saves parameters under their names; remove it, and "
            f"change what model_state_dict returns"
        )
