"""The record that a wrapped model carries: which strategy wrapped it, and what the bare model was.

It lies in the wrapper's own `__dict__`, where `copy.deepcopy` takes it along and where no wrapper that forwards
attributes can be mistaken for the one that was marked.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel_core.dtypes import dtype_name
from parallel_core.errors import WrapError
from parallel_core.names import bare_names, uncompiled
from parallel_core.unchanged import check_unchanged, persistent_buffers
from parallel_core.units import tied_parameters

if TYPE_CHECKING:
    from parallel_core.config import DistributedConfig
    from parallel_core.report import WrapReport
    from parallel_core.strategy import Strategy

RECORD = "_parallel_core_record"
INNER = "_parallel_core_inner"
PART = "_parallel_core_part"

__all__ = [
    "Layout",
    "Record",
    "TensorSpec",
    "bare_parameters",
    "bare_shapes",
    "bare_state",
    "find_record",
    "has_extra_state",
    "inner_module",
    "layout_of",
    "parameter_names",
    "spec_of",
]


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor of the bare model looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)}"


def spec_of(name: str, value: object) -> TensorSpec | None:
    """Return what an entry of a state dict looks like, or None for one that is not a tensor of the model's own.

    Extra state can be a tensor too, but a module makes it when it is asked, each time of the size that it needs.
    """
    if name.rpartition(".")[2] == "_extra_state" or not isinstance(value, torch.Tensor):
        return None
    return TensorSpec(tuple(value.shape), value.dtype)


@dataclass(frozen=True)
class Layout:
    """The bare model's state dict, without its values.

    Attributes:
        entries: what stands under each key, in the model's order; None where `spec_of` gives none (`_extra_state`).
        parameters: the names of the parameters, a tied one by its first name, in the model's order.
        tied: all names of each parameter that has more than one.
        frozen: the names of the parameters that need no gradient.
        buffers: the persistent buffers, by their own names in their modules.
    """

    entries: dict[str, TensorSpec | None]
    parameters: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        """Return the layout of a bare model; the wrappers of `torch.compile`, around it or inside it, don't count."""
        entries = {name: spec_of(name, value) for name, value in bare_state(model).items()}
        bare = bare_names(model)
        parameters = tuple(bare(name) for name, _ in model.named_parameters())
        tied = tuple(tuple(bare(name) for name in group) for group in tied_parameters(model))
        frozen = tuple(bare(name) for name, parameter in model.named_parameters() if not parameter.requires_grad)
        return cls(entries, parameters, tied, frozen, persistent_buffers(model))


@dataclass(frozen=True)
class Record:
    """What was done to a model.

    Attributes:
        strategy: the strategy that wrapped it.
        config: the config that it was wrapped under.
        layout: the bare model's names, shapes and dtypes.
        report: what was asked for and what was done, to be read; None for a record that no wrap has made.
        earlier_optimizers: the optimizers that were there before the wrap.
    """

    strategy: Strategy
    config: DistributedConfig
    layout: Layout
    report: WrapReport | None = None
    earlier_optimizers: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Record:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Record, (self.strategy, self.config, self.layout, self.report)


class _Inside:
    """The mark on a module inside a wrapped one. A copy of that module alone is a bare model again."""

    def __init__(self, wrapped: nn.Module) -> None:
        self._wrapped = weakref.ref(wrapped)

    def is_alive(self) -> bool:
        return self._wrapped() is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Inside | None:
        copied = memo.get(id(self._wrapped()))
        return None if copied is None else _Inside(copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, (True,)  # another process can't know whether the wrapper comes along


def attach(record: Record, wrapped: nn.Module, bare: nn.Module) -> None:
    """Mark a wrapped model with its record, the module inside, where it is another object, and the parts of both."""
    wrapped, bare = uncompiled(wrapped), uncompiled(bare)  # as all who look for the marks do
    vars(wrapped)[RECORD] = record
    mark = _Inside(wrapped)
    for part in wrapped.modules():
        if part is not wrapped:
            vars(part)[PART] = mark
    if bare is not wrapped:
        vars(bare)[INNER] = mark


def find_record(model: nn.Module) -> Record | None:
    """Return the record of a wrapped model, looked up through `torch.compile`, or None for a bare model.

    Raises:
        WrapError: it is no module, a part of a wrapped model, or something that has wrapped models as its parts.
    """
    if not isinstance(model, nn.Module):
        raise WrapError(f"expected a model, a torch.nn.Module, found {type(model).__name__}")
    model = uncompiled(model)
    if _is_inside(model):
        raise WrapError(
            f"this {type(model).__name__} is the module inside a wrapped model, whose parameters may be this rank's "
            f"shards alone; pass what wrap_model_for_training returned"
        )
    record: Record | None = vars(model).get(RECORD)
    if record is None:
        _check_bare(model)
    return record


def inner_module(model: nn.Module) -> nn.Module:
    """Return the user's module inside of a wrapped one: itself where the strategy returned the same object."""
    return next((module for module in model.modules() if _is_inside(module)), model)


def _check_bare(model: nn.Module) -> None:
    """Refuse what the verbs would take for a bare model, though its parameters may be shards.

    Raises:
        WrapError: it is a part of a wrapped model, or has wrapped models as its parts.
    """
    mark = vars(model).get(PART)
    if isinstance(mark, _Inside) and mark.is_alive():
        raise WrapError(
            f"this {type(model).__name__} is a part of a wrapped model; pass the whole, which wrap_model_for_training "
            f"returned"
        )
    found = next((name for name, part in model.named_modules() if RECORD in vars(part)), None)
    if found is not None:
        raise WrapError(
            f"part {found!r} of this {type(model).__name__} is wrapped already, and the whole is not; wrap the whole "
            f"bare model, once, or pass each wrapped part alone"
        )


def _is_inside(module: nn.Module) -> bool:
    return vars(module).get(INNER) is not None


def bare_state(model: nn.Module) -> dict[str, Any]:
    """Return a bare model's state dict, sharing memory, under names without the wrappers of `torch.compile`."""
    bare = bare_names(model)
    return {bare(key): value for key, value in model.state_dict(keep_vars=True).items()}


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module has something to say in a state dict beside its tensors: `get_extra_state` is its own."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def layout_of(model: nn.Module) -> Layout:
    """Return the layout of a bare model, or that which a wrapped one had, and still has.

    Raises:
        StateDictError: a wrapped model is not what it was when it was wrapped, see `check_unchanged`.
    """
    record = find_record(model)
    if record is None:
        return Layout.of(model)
    check_unchanged(model, record.layout)
    return record.layout


def bare_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model, wrapped or bare, by the bare model's names, a tied one by its first name.

    A wrapped model has them in the bare model's order, whatever objects they have become.

    Raises:
        StateDictError: as `layout_of`.
    """
    return dict(zip(layout_of(model).parameters, model.parameters(), strict=True))


def parameter_names(model: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Return all of the bare model's names for each parameter of a model, wrapped or bare."""
    groups = {group[0]: group for group in layout_of(model).tied}
    return {parameter: groups.get(name, (name,)) for name, parameter in bare_parameters(model).items()}


def bare_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of the bare model by its name, a tied one by its first name."""
    layout = layout_of(model)
    return {name: spec.shape for name in layout.parameters if (spec := layout.entries[name]) is not None}
