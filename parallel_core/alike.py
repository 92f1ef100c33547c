"""Whether all ranks were told to do the same, and have the same to do it with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from parallel_core import ranks
from parallel_core.errors import ParallelCoreError, StateDictError, WrapError
from parallel_core.record import Layout
from parallel_core.strategy_config import CORE_FIELDS

if TYPE_CHECKING:
    from parallel_core.config import DistributedConfig

T = TypeVar("T")


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
    raise_differences([each.settings for each in by_rank], _told_differences, "give every rank the same config")
    # The config is the same by now, so it is the device that makes a strategy apply here and not there.
    if len({each.applies for each in by_rank}) > 1:
        answers = [{"the answer of hook applies": f"{each.applies} for {each.device}"} for each in by_rank]
        raise_differences(answers, _told_differences, "train on the same kind of device on every rank")
    with_state = [rank for rank, each in enumerate(by_rank) if each.has_state]
    if with_state and 0 not in with_state:
        raise WrapError(
            f"rank {with_state[0]} passes a state_dict and rank 0 passes none, and it is rank 0's that counts; pass it "
            f"there, or nowhere"
        )


def check_optimizers_alike(by_rank: list[dict[str, str]]) -> None:
    """Refuse optimizers, told in words, that are not the same on all ranks.

    Raises:
        WrapError: they are not; the same error on every rank.
    """
    raise_differences(by_rank, _told_differences, "make the same optimizer on every rank")


class Call(NamedTuple):
    """What a verb on state was called with; must be the same on all ranks.

    Attributes:
        told: in words, by the names of the arguments.
        layout: that of the model.
        sharded_state: the names of what the optimizer has as DTensors, each of which all ranks put together.
    """

    told: dict[str, str]
    layout: Layout
    sharded_state: tuple[str, ...] = ()


def check_calls_alike(by_rank: list[Call]) -> None:
    """Refuse to go on unless the verb was called in the same way on all ranks, for the same model.

    Raises:
        StateDictError: it was not; the same error on every rank.
    """
    told = [call.told for call in by_rank]
    raise_differences(told, _told_differences, "make the same call on every rank", StateDictError)
    layouts = [call.layout for call in by_rank]
    raise_differences(layouts, layout_differences, "pass the same model on every rank", StateDictError)
    states = [call.sharded_state for call in by_rank]
    raise_differences(states, _state_differences, "take the same steps on every rank", StateDictError)


def raise_differences(
    found: Sequence[T],
    differences: Callable[[T, T, int], Iterable[str]],
    advice: str,
    kind: type[ParallelCoreError] = WrapError,
) -> None:
    """Raise one error about what the ranks have found, if it is not the same as on rank 0."""
    lines = [line for index, other in enumerate(found) for line in differences(found[0], other, index)]
    if lines:
        more = f"; and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise kind(f"the ranks do not agree: {'; '.join(lines[:5])}{more}; {advice}")


def _told_differences(first: dict[str, str], other: dict[str, str], index: int) -> Iterator[str]:
    for name in first:
        if name in other and first[name] != other[name]:
            yield f"{name} is {first[name]} on rank 0, {other[name]} on rank {index}"


def _state_differences(first: tuple[str, ...], other: tuple[str, ...], index: int) -> Iterator[str]:
    for name, there, lacking in _of_one_alone(first, other, index):
        yield f"the optimizer has {name} on rank {there}, and not on rank {lacking}"


def meta_differences(first: dict[str, str], other: dict[str, str], index: int) -> Iterator[str]:
    for name in {**first, **other}:
        on_first, on_other = first.get(name, "has values"), other.get(name, "has values")
        if on_first != on_other:
            yield f"{name!r} {on_first} on rank 0, {on_other} on rank {index}"


def unit_differences(first: tuple[str, ...], other: tuple[str, ...], index: int) -> Iterator[str]:
    for name, there, lacking in _of_one_alone(first, other, index):
        yield f"{name!r} is a unit on rank {there}, and none on rank {lacking}"


def _of_one_alone(first: tuple[str, ...], other: tuple[str, ...], index: int) -> Iterator[tuple[str, int, int]]:
    """Yield the names that one of two ranks has, the rank that has it, and the one that lacks it."""
    for name in dict.fromkeys((*first, *other)):
        if (name in first) != (name in other):
            there, lacking = (0, index) if name in first else (index, 0)
            yield name, there, lacking


def layout_differences(first: Layout, other: Layout, index: int) -> Iterator[str]:
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
