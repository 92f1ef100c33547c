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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import nn

from parallel_core import ranks
from parallel_core.errors import WrapError
from parallel_core.filling import check_no_copies
from parallel_core.meta_model import meta_tensors
from parallel_core.names import bare_names
from parallel_core.record import Layout, Record, spec_of
from parallel_core.report import WrapReport, planned_report
from parallel_core.starting import FirstValues, checked_layout
from parallel_core.strategy import Strategy
from parallel_core.strategy_config import CORE_FIELDS

if TYPE_CHECKING:
    from parallel_core.config import DistributedConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")


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


class Told(NamedTuple):
    """What a rank was told to do; must be the same on all of them, but for the state dict.

    Attributes:
        settings: the values of the settings that count, as texts: a rank may lack the plugin that could read another's.
        device: the kind of device to train on.
        applies: whether the strategy applies there.
        has_state: whether there is a state dict to start from.
    """

    settings: dict[str, str]
    device: str
    applies: bool
    has_state: bool


def told(
    config: DistributedConfig, device: torch.device, state_dict: Mapping[str, Any] | None, *, applies: bool
) -> Told:
    """Return what this rank was told, from its settings, its device, and its state dict."""
    of_strategy = f"{config.parallel_strategy}_"
    settings = {
        name: repr(getattr(config, name))
        for name in type(config).__struct_fields__
        if name in CORE_FIELDS or name.startswith(of_strategy)
    }
    # An empty dict is how a rank other than 0 says that it has nothing to say.
    has_state = state_dict is not None if ranks.rank() == 0 else bool(state_dict)
    return Told(settings, device.type, applies, has_state)


def check_alike(by_rank: list[Told]) -> None:
    """Refuse to go on unless all ranks were told to do the same.

    Raises:
        WrapError: they were not; the same error on every rank.
    """
    _raise_differences([each.settings for each in by_rank], _told_differences, "give every rank the same config")
    # The config is the same by now, so it is the device that makes a strategy apply here and not there.
    if len({each.applies for each in by_rank}) > 1:
        answers = [{"the answer of hook applies": f"{each.applies} for {each.device}"} for each in by_rank]
        _raise_differences(answers, _told_differences, "train on the same kind of device on every rank")
    with_state = [rank for rank, each in enumerate(by_rank) if each.has_state]
    if with_state and 0 not in with_state:
        raise WrapError(
            f"rank {with_state[0]} passes a state_dict and rank 0 passes none, and it is rank 0's that counts; pass it "
            f"there, or nowhere"
        )


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
        shown.mine = (whole, dict.fromkeys(meta_tensors(model), "is on the meta device"))
    advice = "build the same model everywhere"
    _raise_differences([layout for layout, _ in shown.by_rank], _layout_differences, advice)
    _raise_differences([on_meta for _, on_meta in shown.by_rank], _meta_differences, advice)
    first_values.check(model, layout)
    return Plan(layout, report, earlier_optimizers(model))


def check_device(device: torch.device) -> None:
    """Refuse a device that this machine has not.

    Raises:
        WrapError: it has none such.
    """
    there = ["cpu"]
    if torch.accelerator.is_available() and (accelerator := torch.accelerator.current_accelerator()) is not None:
        there.append(accelerator.type)
    if device.type not in there:
        raise WrapError(f"device: expected one that this machine has ({', '.join(there)}), found {str(device)!r}")


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
            f"parameters of the wrapped model, after wrap_model_for_training"
        )


def check_optimizers_alike(by_rank: list[str]) -> None:
    """Refuse optimizers, told in words, that are not the same on all ranks.

    Raises:
        WrapError: they are not; the same error on every rank.
    """
    told = [{"the optimizer": text} for text in by_rank]
    _raise_differences(told, _told_differences, "make the same optimizer on every rank")


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


def _raise_differences(found: list[T], differences: Callable[[T, T, int], Iterable[str]], advice: str) -> None:
    """Raise one error about what the ranks have found, if it is not the same as on rank 0."""
    lines = [line for index, other in enumerate(found) for line in differences(found[0], other, index)]
    if lines:
        more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise WrapError(f"the ranks do not agree: {'; '.join(lines[:5])}{more}; {advice}")


def _told_differences(first: dict[str, str], other: dict[str, str], index: int) -> Iterator[str]:
    for name in first:
        if name in other and first[name] != other[name]:
            yield f"{name} is {first[name]} on rank 0, {other[name]} on rank {index}"


def _meta_differences(first: dict[str, str], other: dict[str, str], index: int) -> Iterator[str]:
    for name in {**first, **other}:
        on_first, on_other = first.get(name, "has values"), other.get(name, "has values")
        if on_first != on_other:
            yield f"{name!r} {on_first} on rank 0, {on_other} on rank {index}"


def _layout_differences(first: Layout, other: Layout, index: int) -> Iterator[str]:
    for name in {**first.entries, **other.entries}:
        on_first, on_other = first.entries.get(name, "absent"), other.entries.get(name, "absent")
        if on_first != on_other:
            yield f"{name!r} is {on_first} on rank 0, {on_other} on rank {index}"
    if list(first.entries) != list(other.entries) and first.entries == other.entries:
        yield f"the order of the names on rank {index} is not that on rank 0"
    if first.tied != other.tied:
        yield f"the tied parameters are {list(first.tied)} on rank 0, {list(other.tied)} on rank {index}"
    if first.frozen != other.frozen:
        yield f"the frozen parameters are {list(first.frozen)} on rank 0, {list(other.frozen)} on rank {index}"
