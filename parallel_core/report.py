"""The wrap report: what was asked for, and what was done to the model, measured on the ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from parallel_core import ranks
from parallel_core.dtypes import dtype_name
from parallel_core.names import bare_names
from parallel_core.record import Layout, find_record
from parallel_core.report_text import report_text
from parallel_core.tensors import is_dtensor
from parallel_core.units import Unit, root_unit

if TYPE_CHECKING:
    from parallel_core.config import DistributedConfig
    from parallel_core.strategy import Strategy

__all__ = ["ReportedUnit", "WrapReport", "wrap_report"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReportedUnit:
    """A unit of the wrapped model.

    Attributes:
        name: the module's name in the bare model; empty for the root.
        parameters: the bare names of its parameters, a tied one by its first name.
        numel: how many elements these have.
    """

    name: str
    parameters: tuple[str, ...] = field(repr=False)
    numel: int


@dataclass(frozen=True)
class WrapReport:
    """What a wrap was asked for and what it did. `str()` of it is a block of lines to read.

    Attributes:
        strategy: the strategy's name.
        plugin: the distribution that it comes from, and its version.
        settings: all settings of the strategy, under the names that a config file has for them.
        changed: the names of those that differ from their defaults.
        values: where the first values came from, in words.
        units: the units that the strategy planned, in the order of the model's modules, without the root.
        root: what no unit holds. Under a strategy without units, the whole model.
        tied: all names of each parameter that has more than one.
        dtypes: how many elements of parameters the bare model has of each dtype, by its name (`float32`).
        nbytes: how many bytes the bare model's parameters take.
        held: how many bytes of parameters each rank holds between steps, by rank; measured on the wrapped model: the
            memory behind its parameters, which a strategy may have padded.
        devices: where each rank trains, by rank.
    """

    strategy: str
    plugin: str
    settings: dict[str, Any]
    changed: tuple[str, ...]
    values: str
    units: tuple[ReportedUnit, ...] = field(repr=False)
    root: ReportedUnit
    tied: tuple[tuple[str, ...], ...]
    dtypes: dict[str, int]
    nbytes: int
    held: tuple[int, ...]
    devices: tuple[str, ...]

    @property
    def numel(self) -> int:
        """How many elements the bare model's parameters have."""
        return sum(self.dtypes.values())

    def __str__(self) -> str:
        return report_text(self)


def wrap_report(model: nn.Module) -> WrapReport | None:
    """Return what was done to a wrapped model, or None for a bare one, to which nothing was done.

    Not a collective: one rank may ask alone.

    Args:
        model: what `wrap_model_for_training` returned, the same inside `torch.compile`, or a bare model.

    Raises:
        WrapError: it is the module inside a wrapped one.
    """
    record = find_record(model)
    return None if record is None else record.report


def planned_report(
    model: nn.Module, strategy: Strategy, config: DistributedConfig, layout: Layout, values: str
) -> WrapReport:
    """Return the report on a bare model that is to be wrapped: all of it but what is measured afterwards."""
    options, default = msgspec.structs.asdict(config.options), msgspec.structs.asdict(strategy.config_class())
    units = strategy.plan_units(model, config.options)
    parameters = list(model.parameters())
    dtypes: dict[str, int] = {}
    for parameter in parameters:
        dtype = dtype_name(parameter.dtype)
        dtypes[dtype] = dtypes.get(dtype, 0) + parameter.numel()
    bare = bare_names(model)
    return WrapReport(
        strategy=strategy.name,
        plugin=f"{strategy.distribution} {strategy.version}",
        settings={f"{strategy.name}_{name}": value for name, value in options.items()},
        changed=tuple(f"{strategy.name}_{name}" for name, value in options.items() if value != default[name]),
        values=values,
        units=tuple(_reported(unit, bare) for unit in units),
        root=_reported(root_unit(model, units), bare),
        tied=layout.tied,
        dtypes=dtypes,
        nbytes=sum(parameter.nbytes for parameter in parameters),
        held=(),
        devices=(),
    )


def measured_report(report: WrapReport, wrapped: nn.Module, device: torch.device) -> WrapReport:
    """Return the report with what has become of the model on all ranks; a collective. Rank 0 logs it."""
    gathered = ranks.all_gather((bytes_held(wrapped), str(device)))
    held, devices = zip(*gathered, strict=True)
    measured = replace(report, held=held, devices=devices)
    if ranks.rank() == 0:
        logger.info("%s", measured)
    return measured


def bytes_held(model: nn.Module) -> int:
    """Return how many bytes of memory the parameters of a model keep on this rank.

    Counted by storage: a shard that is a view of the whole keeps the whole, and tied parameters are held once.
    """
    locals_ = [parameter.to_local() if is_dtensor(parameter) else parameter for parameter in model.parameters()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in locals_}
    return sum(storages.values())


def _reported(unit: Unit, bare: Callable[[str], str]) -> ReportedUnit:
    # A path needs its final dot to be told from a parameter of the module above it.
    name = bare(f"{unit.name}.").rstrip(".") if unit.name else ""
    return ReportedUnit(name, tuple(bare(parameter) for parameter in unit.parameters), unit.numel)
