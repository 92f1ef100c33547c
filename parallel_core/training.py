"""The verbs: what a training script does with a model, whatever strategy wrapped it, or none.

Every verb takes the wrapped model, the same inside `torch.compile`, or a bare model, and must be called on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel_core import ranks
from parallel_core.errors import StateDictError, StrategyError, WrapError
from parallel_core.hookspecs import StateDictType
from parallel_core.names import uncompiled
from parallel_core.optimizer_state import named_groups
from parallel_core.optimizer_state_dicts import check_optimizer_state_dict
from parallel_core.record import Layout, Record, attach, bare_parameters, find_record
from parallel_core.state_dicts import (
    IncompatibleKeys,
    check_model_state_dict,
    entries_to_load,
    named,
    parse_state_dict_type,
)
from parallel_core.strategy import Strategy, bare_model_strategy, bound_strategy
from parallel_core.wrapping import check_alike, check_wrap, earlier_optimizers, local_device, log_declined

if TYPE_CHECKING:
    from parallel_core.config import DistributedConfig


def wrap_model_for_training(
    model: nn.Module, config: DistributedConfig, *, device: torch.device | str | None = None
) -> nn.Module | None:
    """Wrap a model with the strategy that the config names.

    Args:
        model: the bare model, the same on every rank; its values are compared, or taken from rank 0.
        config: the settings, the same on every rank.
        device: where this rank trains; by default its accelerator, or the CPU.

    Returns:
        The wrapped model; or None where the strategy has nothing to do, as with a single process, and then the model is
        as it was and stays where it was.

    Raises:
        StrategyError: the strategy is not installed, or broken.
        WrapError: the strategy can't honour the config for this model on this device; the same error on every rank, and
            the model is as it was.
    """
    with ranks.agreement(WrapError):
        strategy = bound_strategy(config.parallel_strategy)
        device = local_device(config) if device is None else torch.device(device)
        applies = strategy.applies(ranks.world_size(), device)
    check_alike(config, applies=applies)
    if not applies:
        log_declined(strategy, config, device)
        return None
    layout = check_wrap(model, strategy, config, device)
    record = Record(strategy, config, layout, earlier_optimizers(model))
    with ranks.agreement(WrapError):
        wrapped = strategy.wrap_model(model, config.options, device)
    attach(record, wrapped, bare=model)
    return wrapped


def wrap_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer to train with, made ready by the model's strategy.

    Raises:
        WrapError: the optimizer was made before the wrap, or holds parameters that are not the model's.
    """
    record, strategy, model = _resolve(model, settle=True)
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
    options = bare_model_strategy().config_class() if record is None else record.config.options
    answer = strategy.wrap_optimizer(model, optimizer, options)
    # A forward between the backward and the step may have left something gathered, which a step makes out of date.
    answer.register_step_pre_hook(lambda *_: strategy.settle(model))
    return answer


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
    kind = parse_state_dict_type(state_dict_type)
    record, strategy, model = _resolve(model, settle=True)
    layout = Layout.of(model) if record is None else record.layout
    entries = strategy.model_state_dict(model, kind)
    expected = {} if kind is StateDictType.FULL and ranks.rank() else layout.entries
    with ranks.agreement():
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
        cast: whether a tensor of another dtype is converted to the model's; otherwise it is an error.

    Returns:
        The missing and the unexpected keys, the same on every rank; both empty with `strict`.

    Raises:
        StateDictError: the dict does not fit; the same error on every rank, and nothing is loaded.
    """
    kind = parse_state_dict_type(state_dict_type)
    record, strategy, model = _resolve(model, settle=True)
    layout = Layout.of(model) if record is None else record.layout
    incompatible = check_model_state_dict(layout, state_dict, kind, strict=strict, cast=cast)
    strategy.load_model_state_dict(model, entries_to_load(layout, state_dict, kind, incompatible.missing_keys), kind)
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
    kind = parse_state_dict_type(state_dict_type)
    _, strategy, model = _resolve(model, settle=True)
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
    kind = parse_state_dict_type(state_dict_type)
    record, strategy, model = _resolve(model, settle=True)
    layout = Layout.of(model) if record is None else record.layout
    with ranks.agreement(StateDictError):
        groups = named_groups(optimizer, bare_parameters(model))
    checked = check_optimizer_state_dict(layout, groups, state_dict, kind)
    strategy.load_optimizer_state_dict(model, optimizer, checked, kind)


def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients so that their norm over the whole model is at most `max_norm`.

    Returns:
        The norm before clipping: a plain tensor without dimensions, the same on every rank.
    """
    _, strategy, model = _resolve(model, settle=True)
    return strategy.clip_grad_norm(model, float(max_norm), float(norm_type))


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager under which backward passes accumulate gradients without communication.

    The first backward pass outside of it makes the gradients the mean over the ranks of what each has accumulated.
    """
    _, strategy, model = _resolve(model)
    return strategy.no_sync(model)


def grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    """Return the gradient scaler for this model: enabled where it trains in fp16; elsewhere it does nothing."""
    _, strategy, model = _resolve(model)
    return strategy.grad_scaler(model)


def data_parallel(model: nn.Module) -> tuple[int, int]:
    """Return `(index, count)`: this rank reads share `index` of the data cut into `count`."""
    _, strategy, model = _resolve(model)
    return strategy.data_parallel(model)


def _resolve(model: nn.Module, *, settle: bool = False) -> tuple[Record | None, Strategy, nn.Module]:
    """Return a model's record, the strategy that answers for it, and the model outside of `torch.compile`."""
    record = find_record(model)
    if record is None:
        return None, bare_model_strategy(), model
    model = uncompiled(model)
    if settle:
        record.strategy.settle(model)
    return record, record.strategy, model
