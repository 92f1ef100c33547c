"""What of a model is on the meta device, and whether something would give it a value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from parallel_core.errors import WrapError
from parallel_core.names import bare_names
from parallel_core.parameter_checks import kept_elsewhere, parameter_finder
from parallel_core.state_dicts import named
from parallel_core.tensor_checks import memory_problems


def meta_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a bare model that are on the meta device, by bare name: parameters, buffers, attributes.

    Attributes are tensors that a module keeps without registering them; nothing but the module itself can make those.
    """
    return {name: tensor for _, _, name, tensor in each_meta_tensor(model)}


def each_meta_tensor(model: nn.Module) -> Iterator[tuple[nn.Module, str, str, torch.Tensor]]:
    """Yield what `meta_tensors` returns: the module that owns a tensor, its name there, its bare name, the tensor."""
    bare = bare_names(model)
    for path, module in model.named_modules():
        for name, tensor in own_meta_tensors(module):
            yield module, name, bare(f"{path}.{name}" if path else name), tensor


def check_start(model: nn.Module, loaded: Collection[str] | None) -> None:
    """Refuse a model with tensors that nothing would give a value to, or that other ones could not take the place of.

    Args:
        model: the bare model; may have no tensor on the meta device at all.
        loaded: the names that a state dict gives values to right after the start; None without one.

    Raises:
        WrapError: it names those tensors.
    """
    if problems := list(_replacement_problems(model)):
        raise WrapError("; ".join(problems))
    stranded = {
        name: type(module).__name__
        for module, _, name, _ in each_meta_tensor(model)
        if reset_method(module) is None and (loaded is None or name not in loaded)
    }
    if stranded:
        kinds = ", ".join(dict.fromkeys(stranded.values()))
        advice = "pass a state dict" if loaded is None else "make it persistent, so that the state dict has it"
        raise WrapError(
            f"{named('on the meta device, and nothing gives them values', stranded)}; give {kinds} a method "
            f"reset_parameters, {advice}, or build the model on a device"
        )


def _replacement_problems(model: nn.Module) -> Iterator[str]:
    """Yield what would go on with a tensor of the meta device when the one with values has taken its place."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    for name, parameter in parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield f"parameter {name!r} on the meta device has a hook for its gradient; register it after the wrap"
    name_of = parameter_finder(parameters)
    for holder, attribute, name in kept_elsewhere(model, name_of):
        yield (
            f"{holder or 'the model'!r} keeps parameter {name!r} in its attribute {attribute!r} too, and on the meta "
            f"device; reach it through the module that owns it, or use nn.ParameterList"
        )
    yield from memory_problems(model, on_meta=True)


def registered(module: nn.Module) -> tuple[dict[str, torch.Tensor | None], dict[str, torch.Tensor | None]]:
    """Return where a module keeps its own parameters and its own buffers, to be changed."""
    # What stands in `_parameters` stays a parameter here, which a type checker can't see.
    return module._parameters, module._buffers  # type: ignore[return-value]


def own_meta_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield a module's own tensors that are on the meta device."""
    for tensors in (*registered(module), vars(module)):
        for name, tensor in tensors.items():
            if isinstance(tensor, torch.Tensor) and tensor.is_meta:
                yield name, tensor


def reset_method(module: nn.Module) -> Callable[[], object] | None:
    """Return what gives a module's own tensors their first values, or None if it has no such method."""
    # torch's MultiheadAttention and Transformer have theirs with an underscore.
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            found: Callable[[], object] = method
            return found
    return None
