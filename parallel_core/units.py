"""Which modules become units: the parameters that a sharding strategy gathers and frees together.

For strategy authors too. Nothing here touches a device or a process group: the same function answers for the plan, on
a model on the meta device, and for the wrap.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from torch import nn

from parallel_core.errors import did_you_mean
from parallel_core.names import unwrapped

__all__ = ["Unit", "choose_units", "describe_no_units", "layer_problems", "root_unit", "tied_parameters"]


@dataclass(frozen=True)
class Unit:
    """One unit of a model.

    Attributes:
        name: the module's name in the bare model; empty for the root.
        module: the module that becomes the unit.
        parameters: its parameters that no inner unit holds, by the first of their names in the bare model.
    """

    name: str
    module: nn.Module = field(repr=False)
    parameters: dict[str, nn.Parameter] = field(repr=False)

    @property
    def numel(self) -> int:
        """The number of parameters in the unit, in elements."""
        return sum(parameter.numel() for parameter in self.parameters.values())


def choose_units(
    model: nn.Module,
    min_params: int,
    *,
    classes: Collection[str] = (),
    always: Callable[[nn.Module], bool] = lambda module: False,
) -> list[Unit]:
    """Return the modules that become units of their own, in the order of `model.named_modules()`, without the root.

    A module becomes one where it has at least `min_params` parameters that are not already in an inner unit; this is
    how torch's `size_based_auto_wrap_policy` counts. With 0 it is every module that has parameters of its own. Never
    a unit is: a container without forward (`ModuleList`, `ModuleDict`, ...), whose hooks would never run; a part of a
    module that reads its children's weights without calling them (`MultiheadAttention`), though the whole may be; a
    module that stands in several places, as a wrapper would be put into one of them; a module with a parameter that is
    also reached from outside of it. Such parameters go to the nearest unit that holds all of their places. Where a
    module is inside the wrapper of `torch.compile` or of activation checkpointing, the wrapper is the unit.

    Args:
        model: the bare model; may be on the meta device.
        min_params: in elements, at least 0.
        classes: names of classes; a module of one of them becomes a unit whatever its size, by the same rules, and
            what is inside of it does so only if it is of one of them too, or `always` says so.
        always: modules for which this is true become units whatever their size, by the same rules.
    """
    first_name = {parameter: name for name, parameter in model.named_parameters()}
    can_hold = _holding_test(model)
    units: list[Unit] = []
    visited: set[nn.Module] = {model}
    taken: set[nn.Parameter] = set()
    for name, module, is_named, by_size in _inside_out(model, "", classes, by_size=True):
        if module in visited:
            continue
        visited.add(module)
        left = [parameter for parameter in module.parameters() if parameter not in taken]
        is_big = by_size and sum(parameter.numel() for parameter in left) >= min_params
        if left and (is_big or is_named or always(module)) and can_hold(module, left):
            taken.update(left)
            units.append(Unit(name, module, {first_name[parameter]: parameter for parameter in left}))
    order = {module: index for index, module in enumerate(model.modules())}
    return sorted(units, key=lambda unit: order[unit.module])


def _inside_out(
    model: nn.Module, prefix: str, classes: Collection[str], *, by_size: bool
) -> Iterator[tuple[str, nn.Module, bool, bool]]:
    """Yield the modules below one that may be units, inner ones first; the model itself is never one.

    Not a closure that calls itself: that is a cycle, in which the whole parameters would outlive the wrap.

    Yields:
        The name, the module, whether its class is named, and whether its size counts: not inside one that is named.
    """
    for child_name, child in _parts(model):
        is_named = type(unwrapped(child)).__name__ in classes
        name = f"{prefix}{child_name}"
        yield from _inside_out(child, f"{name}.", classes, by_size=by_size and not is_named)
        yield name, child, is_named, by_size


def layer_problems(model: nn.Module, classes: Collection[str], field: str) -> Iterator[str]:
    """Yield what keeps modules of the named classes from being units, a sentence each.

    Args:
        model: the bare model.
        classes: names of classes, as `choose_units` takes them.
        field: the setting that holds them, with the strategy's prefix.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    class_of = {name: type(unwrapped(module)).__name__ for name, module in modules.items()}
    held: dict[str, set[nn.Parameter]] = {}  # by the units at a path and below it
    for unit in choose_units(model, sys.maxsize, classes=classes):
        path = unit.name
        while path:
            held.setdefault(path, set()).update(unit.parameters.values())
            path = path.rpartition(".")[0]
    for wanted in classes:
        found = [name for name in modules if class_of[name] == wanted]
        if not found:
            known = sorted(set(class_of.values()))
            yield (
                f"{field} names {wanted!r}, and no module inside the model is of this class; its classes are "
                f"{', '.join(map(repr, known)) or 'none'}{did_you_mean(wanted, known)}"
            )
        elif all(next(modules[name].parameters(), None) is None for name in found):
            yield f"{field} names {wanted!r}, and no module of this class has parameters; leave it out"
        for name in found:
            in_units = held.get(name, set())
            left = [own for own, parameter in modules[name].named_parameters() if parameter not in in_units]
            if left:
                yield (
                    f"{field} names {wanted!r}, and {name!r} can't be a unit: it is a container without forward, "
                    f"stands in several places, is a part that its parent reads without calling it, or shares "
                    f"{left[0]!r} with a module outside of it; name the class of the module around it"
                )


def root_unit(model: nn.Module, units: list[Unit]) -> Unit:
    """Return the unit of the whole model: what the given units leave over."""
    taken = {parameter for unit in units for parameter in unit.parameters.values()}
    left = {name: parameter for name, parameter in model.named_parameters() if parameter not in taken}
    return Unit("", model, left)


def describe_no_units(model: nn.Module, field: str, min_params: int) -> str:
    """Return the warning for a model without units: it is gathered whole, and no memory is saved.

    Args:
        model: the bare model.
        field: the setting that holds the threshold, with the strategy's prefix.
        min_params: its value, in elements.
    """
    can_hold = _holding_test(model)
    inside = {part for module in model.modules() if _reads_its_children(module) for part in module.modules()}
    sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if name and (module not in inside or _reads_its_children(module)) and can_hold(module, module.parameters())
    }
    largest = sorted((name for name in sizes if sizes[name]), key=lambda name: -sizes[name])[:3]
    if not largest:
        # Its size is not what stands in the way: a lower value would change nothing.
        return (
            f"{field} = {min_params:_}: this model has no module that could be a unit, so the root holds all "
            f"{sum(parameter.numel() for parameter in model.parameters()):_} parameters and no memory is saved, "
            f"whatever the value; build it of modules that are called one after another"
        )
    listed = ", ".join(f"{name!r} ({sizes[name]:_})" for name in largest)
    return (
        f"{field} = {min_params:_}: no module has as many parameters, so the root holds them all and no memory is "
        f"saved; the largest modules are {listed}: set {field} = {sizes[largest[0]]:_} or less"
    )


def tied_parameters(model: nn.Module) -> list[tuple[str, ...]]:
    """Return the names of each parameter that has more than one, in the model's order."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [tuple(group) for group in names.values() if len(group) > 1]


def _holding_test(model: nn.Module) -> Callable[[nn.Module, Iterable[nn.Parameter]], bool]:
    """Return a test whether a module runs as a whole and stands in the only way to the given parameters."""
    module_names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        module_names.setdefault(module, []).append(name)
    parameter_names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter_names.setdefault(parameter, []).append(name)

    def can_hold(module: nn.Module, parameters: Iterable[nn.Parameter]) -> bool:
        place, *others = module_names[module]
        return (
            not others
            and has_forward(module)
            and all(name.startswith(f"{place}.") for parameter in parameters for name in parameter_names[parameter])
        )

    return can_hold


def has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called as a whole, as a container can't."""
    # As it stands in the class: a ScriptModule's answers for an instance alone, and fails where its class is asked.
    own = inspect.getattr_static(type(module), "forward")
    return own is not nn.Module.forward or "forward" in vars(module)


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules below one that may be units, with their names in it."""
    content = unwrapped(module)
    if _reads_its_children(content):
        return
    inside = ""
    if content is not module:
        inside = next(name for name, part in module.named_modules() if part is content) + "."
    for name, child in content.named_children():
        yield f"{inside}{name}", child


def _reads_its_children(module: nn.Module) -> bool:
    # MultiheadAttention passes out_proj.weight to a function; in evaluation TransformerEncoderLayer passes the weights
    # of all its children to one fused kernel. A unit inside would not be gathered then.
    return isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer)
