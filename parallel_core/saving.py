"""The verbs on state: what a model and its optimizer hold, read and loaded under the bare model's names.

Every verb takes the wrapped model, the same inside `torch.compile`, or a bare model, and must be called on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from parallel_core import ranks
from parallel_core.alike import Call, check_calls_alike
from parallel_core.answering import settled
from parallel_core.errors import StateDictError, StrategyError
from parallel_core.filling import check_can_be_filled, check_can_be_read, check_extra_state
from parallel_core.hookspecs import StateDictType
from parallel_core.optimizer_state import check_copies, check_has_names, optimizer_told, sharded_entries
from parallel_core.optimizer_state_dicts import Wanted, check_optimizer_state_dict
from parallel_core.outlines import entries_to_load
from parallel_core.record import bare_parameters, layout_of
from parallel_core.state_dicts import (
    IncompatibleKeys,
    check_flags,
    check_model_state_dict,
    named,
    parse_state_dict_type,
)
from parallel_core.strategy import Strategy


def model_state_dict(model: nn.Module, state_dict_type: StateDictType | str = StateDictType.FULL) -> dict[str, Any]:
    """Return the model's parameters and persistent buffers under the bare model's names, in its order.

    Args:
        model: the model.
        state_dict_type: `full`: rank 0 gets every tensor whole, on the CPU, in the dtype it is trained in, as a
            snapshot; the other ranks get `{}`. `sharded`: every rank gets every key, with its own part of what is
            sharded, as DTensor; it may share memory with the model.

    Raises:
        StateDictError: `state_dict_type` is neither of the two.
    """
    with ranks.comparison(StateDictError) as call:
        kind = parse_state_dict_type(state_dict_type)
        record, strategy, model = settled(model)
        check_can_be_read(model, record)
        check_extra_state(model)
        layout = layout_of(model)
        call.mine = Call({"state_dict_type": kind.value, "the strategy": str(strategy)}, layout)
    check_calls_alike(call.by_rank)
    expected = {} if kind is StateDictType.FULL and ranks.rank() else layout.entries
    with ranks.agreement(StateDictError):
        entries = strategy.model_state_dict(model, kind)
        _check_names(strategy, entries, expected)
    return {name: entries[name] for name in expected}


def _check_names(strategy: Strategy, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    if missing or unexpected:
        raise StrategyError(
            f"strategy {strategy}: hook model_state_dict returned other names than the bare model's: "
            f"{named('missing', missing)}; {named('unexpected', unexpected)}; this is a bug in {strategy.distribution}"
        )


def load_model_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any] | None,
    state_dict_type: StateDictType | str = StateDictType.FULL,
    *,
    strict: bool = True,
    cast: bool = False,
) -> IncompatibleKeys:
    """Load a state dict into the model, in place. The caller's dict is never changed.

    Args:
        model: the model.
        state_dict: what `model_state_dict` returned, under any strategy. With `full`, rank 0's counts, and the other
            ranks may pass `{}` or None; with `sharded`, every rank passes its own.
        state_dict_type: `full` or `sharded`.
        strict: whether missing and unexpected keys are an error.
        cast: whether a tensor of another dtype is converted to the model's, floating point to floating point and
            complex to complex; otherwise it is an error.

    Returns:
        The missing and the unexpected keys, the same on every rank; both empty with `strict`.

    Raises:
        StateDictError: the dict does not fit; the same error on every rank, and nothing is loaded.
    """
    with ranks.comparison(StateDictError) as call:
        kind = parse_state_dict_type(state_dict_type)
        check_flags(strict=strict, cast=cast)
        record, strategy, model = settled(model)
        layout = layout_of(model)
        check_can_be_filled(model, record)
        told = {"state_dict_type": kind.value, "strict": repr(strict), "cast": repr(cast)}
        call.mine = Call({**told, "the strategy": str(strategy)}, layout)
    check_calls_alike(call.by_rank)
    incompatible = check_model_state_dict(layout, state_dict, kind, strict=strict, cast=cast)
    entries = entries_to_load(layout, state_dict, kind, incompatible.missing_keys)
    with ranks.agreement(StateDictError):  # a module of the user's takes its extra state last
        strategy.load_model_state_dict(model, entries, kind)
    return incompatible


def optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict_type: StateDictType | str = StateDictType.FULL
) -> dict[str, Any]:
    """Return the optimizer's state by parameter name; reading it never changes it, before the first step as well.

    Args:
        model: the model whose parameters the optimizer holds.
        optimizer: the optimizer.
        state_dict_type: as for `model_state_dict`.

    Returns:
        `{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], option: value, ...}]}`, or `{}` under
        `full` on a rank other than 0.
    """
    with ranks.comparison(StateDictError) as call:
        kind = parse_state_dict_type(state_dict_type)
        _, strategy, model = settled(model)
        layout, parameters = layout_of(model), bare_parameters(model)
        told = {"state_dict_type": kind.value, "the strategy": str(strategy)} | optimizer_told(optimizer, parameters)
        check_has_names(optimizer)
        check_copies(optimizer, parameters)
        call.mine = Call(told, layout, sharded_entries(optimizer, parameters))
    check_calls_alike(call.by_rank)
    return strategy.optimizer_state_dict(model, optimizer, kind)


def load_optimizer_state_dict(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    state_dict_type: StateDictType | str = StateDictType.FULL,
) -> None:
    """Replace the optimizer's state and the options of its parameter groups. The caller's dict is never changed.

    Args:
        model: the model whose parameters the optimizer holds.
        optimizer: an optimizer of the same kind, with the same parameter groups.
        state_dict: what `optimizer_state_dict` returned, under any strategy; who passes what is as for
            `load_model_state_dict`.
        state_dict_type: `full` or `sharded`.

    Raises:
        StateDictError: the dict does not fit; the same error on every rank, and nothing is loaded.
    """
    with ranks.comparison(StateDictError) as call:
        kind = parse_state_dict_type(state_dict_type)
        _, strategy, model = settled(model)
        layout, parameters = layout_of(model), bare_parameters(model)
        told = {"state_dict_type": kind.value, "the strategy": str(strategy)} | optimizer_told(optimizer, parameters)
        call.mine = Call(told, layout)
    check_calls_alike(call.by_rank)
    checked = check_optimizer_state_dict(Wanted(layout, optimizer, parameters), state_dict, kind)
    with ranks.agreement(StateDictError):  # an optimizer runs hooks of the user's when it has all of it
        strategy.load_optimizer_state_dict(model, optimizer, checked, kind)
