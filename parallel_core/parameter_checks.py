"""What keeps the parameters of a bare model from being cut into shards that take their place.

Part of what `sharding_checks` finds.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType, TracebackType

import torch
from torch import nn

from parallel_core.dtypes import dtype_name
from parallel_core.names import bare_names, uncompiled
from parallel_core.record import bare_state
from parallel_core.tensor_checks import memory_problems, overlap
from parallel_core.tensors import storage

__all__ = ["kept_elsewhere", "parameter_finder", "parameter_problems"]

_KNOWN = frozenset([*vars(nn.Module()), "_compiled_call_impl"])  # torch.compile keeps what it has compiled for
_ATOMS = frozenset([int, float, complex, str, bytes, bool, type(None)])  # of which there may be many in a list
# From here on everything could be reached: what a program logs to, say, and the variables of all that called it.
_ENDS = (
    *(torch.Tensor, nn.Module, torch.optim.Optimizer, type, ModuleType, CodeType),
    *(logging.Logger, BaseException, TracebackType, FrameType, GeneratorType),
)
_MOST = 1_000_000  # objects that are looked at from one attribute: a model may hold its data, too


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
    kept: dict[tuple[str, str], str] = {}
    for holder, attribute, name in kept_elsewhere(model, parameter_finder(dict(model.named_parameters()))):
        kept.setdefault((holder, attribute), name)
    for (holder, attribute), name in kept.items():
        yield (
            f"{holder or 'the model'!r} keeps parameter {name!r} in its attribute {attribute!r} too, where {strategy} "
            f"can't put its shard; reach it through the module that owns it, or use nn.ParameterList"
        )
    yield from memory_problems(model)
    yield from _state_dict_problems(model, strategy)


def parameter_finder(named: Mapping[str, nn.Parameter]) -> Callable[[object], str | None]:
    """Return the function that names the parameter which something is, or has memory of."""
    own = {id(parameter): name for name, parameter in named.items()}
    memory: dict[Hashable, list[str]] = {}
    for name, parameter in named.items():
        memory.setdefault(storage(parameter), []).append(name)

    def name_of(item: object) -> str | None:
        if id(item) in own:
            return own[id(item)]
        if not issubclass(type(item), torch.Tensor) or not memory:
            return None
        assert isinstance(item, torch.Tensor)
        return next((name for name in memory.get(storage(item), ()) if overlap(item, named[name])), None)

    return name_of


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


def kept_elsewhere(model: nn.Module, name_of: Callable[[object], str | None]) -> Iterator[tuple[str, str, str]]:
    """Yield where modules keep things beside the place that torch knows of: what stands there later is what it was.

    Looked at is all that an attribute of a module reaches, through containers, other objects and what functions have
    closed over, but not through other modules, tensors and optimizers.

    Args:
        model: the bare model.
        name_of: returns the name of what is looked for, and None for anything else.

    Yields:
        the name of the module, that of its attribute, and what `name_of` has returned, each once for an attribute.
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        if uncompiled(module) is not module:
            continue
        for attribute, value in vars(module).items():
            if attribute not in _KNOWN and not _is_kept_up_to_date(module, attribute):
                told = dict.fromkeys(map(name_of, _reached(value, seen)))
                yield from ((name, attribute, found) for found in told if found is not None)


def _is_kept_up_to_date(module: nn.Module, attribute: str) -> bool:
    # Recurrent layers are told of each parameter that is set; the old spectral norm makes its weight in each forward.
    is_flat = isinstance(module, nn.RNNBase) and attribute in ("_flat_weights", "_flat_weight_refs")
    return is_flat or f"{attribute}_orig" in module._parameters


def _reached(value: object, seen: set[int]) -> Iterator[object]:
    """Yield the tensors, modules and other objects that can be reached from a value, the near ones first.

    Args:
        value: the value.
        seen: the identities of what was looked into already, by an earlier call too.
    """
    waiting, count = deque([value]), 0
    while waiting and count < _MOST:
        item, count = waiting.popleft(), count + 1
        kind = type(item)  # not isinstance, which asks an object for its class: it may say anything, or fail
        if kind in _ATOMS:
            continue
        yield item
        if id(item) in seen or issubclass(kind, _ENDS):
            continue
        seen.add(id(item))
        if issubclass(kind, FunctionType):  # it refers to its whole module too
            waiting.extend(item.__closure__ or ())  # type: ignore[attr-defined]  # mypy does not see what it is
            waiting.extend(item.__defaults__ or ())  # type: ignore[attr-defined]  # likewise
        elif issubclass(kind, weakref.ref):
            waiting.append(item())  # type: ignore[operator]  # likewise
        else:
            waiting.extend(gc.get_referents(item))


def _state_dict_problems(model: nn.Module, strategy: str) -> Iterator[str]:
    bare, state = bare_names(model), bare_state(model)
    lacking = next((name for name, _ in model.named_parameters() if bare(name) not in state), None)
    if lacking is not None:
        yield (
            f"the state dict of the model has no {bare(lacking)!r}, which is a parameter: a hook, or an override of "
            f"state_dict, drops or renames it, and {strategy} saves parameters under their names; remove it, and "
            f"change what model_state_dict returns"
        )
