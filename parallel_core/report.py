"""The wrap report: what was asked for, and what was done to the model, measured on the ranks."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from parallel_core import ranks
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


def make_report(
    strategy: Strategy,
    config: DistributedConfig,
    layout: Layout,
    units: tuple[ReportedUnit, ...],
    wrapped: nn.Module,
    device: torch.device,
) -> WrapReport:
    """Return the report on a model that has just been wrapped; a collective."""
    settings = {f"{strategy.name}_{name}": value for name, value in msgspec.structs.asdict(config.options).items()}
    default = msgspec.structs.asdict(strategy.config_class())
    changed = tuple(
        name for name, value in settings.items() if value != default[name.removeprefix(f"{strategy.name}_")]
    )
    dtypes: dict[str, int] = {}
    nbytes = 0
    for name in layout.parameters:
        spec = layout.entries[name]
        assert spec is not None  # a parameter is a tensor
        numel = math.prod(spec.shape)
        nbytes += numel * spec.dtype.itemsize
        dtype = str(spec.dtype).removeprefix("torch.")
        dtypes[dtype] = dtypes.get(dtype, 0) + numel
    gathered = ranks.all_gather((bytes_held(wrapped), str(device)))
    root, *others = units
    return WrapReport(
        strategy=strategy.name,
        plugin=f"{strategy.distribution} {strategy.version}".rstrip(),
        settings=settings,
        changed=changed,
        units=tuple(others),
        root=root,
        tied=layout.tied,
        dtypes=dtypes,
        nbytes=nbytes,
        held=tuple(held for held, _ in gathered),
        devices=tuple(where for _, where in gathered),
    )


def log_report(report: WrapReport) -> None:
    """Log the report as one block, on rank 0."""
    if ranks.rank() == 0:
        logger.info("%s", report)


def reported_units(model: nn.Module, units: list[Unit]) -> tuple[ReportedUnit, ...]:
    """Return what a report keeps of the planned units of a bare model, the root first.

    Before the wrap: it takes the modules' parameters apart, and names change.
    """
    bare = bare_names(model)

    def kept(unit: Unit) -> ReportedUnit:
        # A path needs its final dot to be told from a parameter of the module above it.
        name = bare(f"{unit.name}.").rstrip(".") if unit.name else ""
        return ReportedUnit(name, tuple(bare(parameter) for parameter in unit.parameters), unit.numel)

    return (kept(root_unit(model, units)), *(kept(unit) for unit in units))


def bytes_held(model: nn.Module) -> int:
    """Return how many bytes of memory the parameters of a model keep on this rank.

    Counted by storage: a shard that is a view of the whole keeps the whole, and tied parameters are held once.
    """
    locals_ = [parameter.to_local() if is_dtensor(parameter) else parameter for parameter in model.parameters()]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in locals_}
    return sum(storages.values())
