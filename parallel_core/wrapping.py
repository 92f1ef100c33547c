"""What comes before a wrap: the device, the reasons to decline, and everything that could go wrong with it.

All of it is found and agreed on by the ranks before the strategy touches the model.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from parallel_core import ranks
from parallel_core.alike import layout_differences, meta_differences, raise_differences, unit_differences
from parallel_core.errors import WrapError
from parallel_core.filling import check_no_copies
from parallel_core.meta_model import meta_tensors
from parallel_core.names import bare_names
from parallel_core.record import Layout, Record, spec_of
from parallel_core.report import WrapReport, planned_report
from parallel_core.starting import FirstValues, checked_layout
from parallel_core.strategy import Strategy

if TYPE_CHECKING:
    from parallel_core.config import DistributedConfig

logger = logging.getLogger(__name__)


class Plan(NamedTuple):
    """What is known of a bare model when all ranks have agreed to wrap it.

    Attributes:
        layout: its names, shapes and dtypes.
        report: the wrap report, but for what is measured after the wrap.
        earlier_optimizers: the optimizers alive that may hold its parameters.
    """

    layout: Layout
    report: WrapReport
    earlier_optimizers: weakref.WeakSet[torch.optim.Optimizer]


def chosen_device(asked: torch.device | str | None, config: DistributedConfig) -> torch.device:
    """Return the device to train on: the one asked for, or by default `local_device`.

    Of the CPU there is one, whatever index it is given; of an accelerator without one, the current one is meant.

    Raises:
        WrapError: it is no device.
    """
    if asked is None:
        return local_device(config)
    try:
        device = torch.device(asked)
    except TypeError as error:  # what torch says of it is a list of signatures
        hint = "; pass its .device" if isinstance(getattr(asked, "device", None), torch.device) else ""
        raise WrapError(f"device: expected a torch.device or its name, found {asked!r}{hint}") from error
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise WrapError(f"device: expected a torch.device or its name, found {asked!r} ({reason})") from error
    if device.type == "cpu":
        return torch.device("cpu")
    if str(device) in _device_types():  # without an index
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def local_device(config: DistributedConfig) -> torch.device:
    """Return the device of this rank: its accelerator, or the CPU where there is none or `backend` is `gloo`."""
    if config.backend == "gloo" or not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None  # is_available() said so
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))


def check_not_forgotten() -> None:
    """Refuse to leave a model bare on one of several ranks that have not joined: each would train a model of its own.

    Raises:
        WrapError: a launcher's WORLD_SIZE says that there are others, and there is no process group.
    """
    started = os.environ.get("WORLD_SIZE", "1")
    if ranks.world_size() == 1 and "RANK" in os.environ and started.isdecimal() and int(started) > 1:
        raise WrapError(
            f"{started} ranks were started (WORLD_SIZE), and this one has joined no process group: each would train a "
            f"model of its own; wrap and train inside `with process_group(config):`"
        )


def log_declined(strategy: Strategy, config: DistributedConfig, device: torch.device) -> None:
    """Say that the model stays bare, and which settings are therefore not in effect."""
    logger.info(
        "strategy %s does not apply to %d rank(s) on %s: the model stays bare", strategy, ranks.world_size(), device
    )
    unmet = [f"{strategy.name}_{name}" for name in config.options.lost_if_declined()]
    if unmet:
        settings = ", ".join(f"{name}={getattr(config, name)!r}" for name in unmet)
        logger.warning("not in effect, because strategy %r does not apply here: %s", strategy.name, settings)


def check_wrap(
    model: nn.Module,
    strategy: Strategy,
    config: DistributedConfig,
    device: torch.device,
    first_values: FirstValues,
) -> Plan:
    """Agree that the model can be wrapped, on every rank and in the same way; a collective. Touches nothing.

    Returns:
        what is to be wrapped.

    Raises:
        WrapError: it can't be; the same error on every rank.
        StateDictError: the state dict that its first values come from does not fit; likewise.
    """
    with ranks.comparison(WrapError) as shown:
        check_device(device)
        layout = checked_layout(model)
        problems = strategy.check_model(model, config.options, device)
        if problems:
            raise WrapError(f"strategy {strategy.name!r} can't wrap this model: {'; '.join(problems)}")
        check_no_copies(model)
        report = planned_report(model, strategy, config, layout, first_values.told(model))
        bare = bare_names(model)
        buffers = {bare(name): spec_of(name, buffer) for name, buffer in model.named_buffers()}
        # A state dict lacks the buffers that are not persistent, and they are handed from rank to rank like the others.
        whole = replace(layout, entries={**layout.entries, **buffers})
        units = tuple(unit.name for unit in report.units)
        shown.mine = (whole, dict.fromkeys(meta_tensors(model), "is on the meta device"), units)
    advice = "build the same model everywhere"
    layouts, on_meta, units_by_rank = zip(*shown.by_rank, strict=True)
    raise_differences(layouts, layout_differences, advice)
    raise_differences(on_meta, meta_differences, advice)
    raise_differences(units_by_rank, unit_differences, advice)
    first_values.check(model, layout)
    return Plan(layout, report, earlier_optimizers(model))


def check_device(device: torch.device) -> None:
    """Refuse a device that this machine has not.

    Raises:
        WrapError: it has none such.
    """
    there = ["cpu", *_device_types()]
    if device.type not in there:
        raise WrapError(f"device: expected one that this machine has ({', '.join(there)}), found {str(device)!r}")


def _device_types() -> list[str]:
    """Return the kind of this machine's accelerator, or nothing."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [] if accelerator is None else [accelerator.type]


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, record: Record | None) -> None:
    """Refuse an optimizer that would not train the model, wrapped or bare.

    Raises:
        WrapError: it is none, it was made before the wrap, or holds parameters that are not the model's.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise WrapError(f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if record is not None and optimizer in record.earlier_optimizers:
        raise WrapError(
            "the optimizer was made before the model was wrapped and may train nothing; make it from the parameters of "
            "the wrapped model, after wrap_model_for_training"
        )
    own = set(model.parameters())
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(parameter not in own for parameter in held)
    if strangers:
        raise WrapError(
            f"{strangers} of the {len(held)} parameters of the optimizer are not the model's; make it from the "
            f"parameters of the wrapped model, after wrap_model_for_training; to train two models with it, wrap one "
            f"module that has both"
        )


def earlier_optimizers(model: nn.Module) -> weakref.WeakSet[torch.optim.Optimizer]:
    """Return the optimizers alive now that may hold parameters of the bare model.

    An optimizer that was made before the wrap can't be told by its parameters: DDP and FSDP1 keep the parameter objects
    and change what lies behind them.
    """
    found: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
    if _is_held_elsewhere(model):
        # Looks at every object of the process, for a tenth of a second.
        found.update(alive for alive in gc.get_objects() if issubclass(type(alive), torch.optim.Optimizer))
    return found


def _is_held_elsewhere(model: nn.Module) -> bool:
    """Tell whether anything but the model's own modules has a reference to one of its parameters."""

    def references(values: Iterable[object]) -> list[int]:
        return [sys.getrefcount(value) for value in values]

    overhead = references([object()])[0] - 1
    holders = [module._parameters for module in model.modules()]
    places = Counter(id(parameter) for holder in holders for parameter in holder.values())
    return any(
        parameter is not None and count - overhead > places[id(parameter)]
        for holder in holders
        for parameter, count in zip(holder.values(), references(holder.values()), strict=True)
    )
