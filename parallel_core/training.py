"""The verbs of a training loop, whatever strategy wrapped the model, or none; those on state are in `saving`.

Every verb takes the wrapped model, the same inside `torch.compile`, or a bare model, and must be called on every rank.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from parallel_core import ranks
from parallel_core.alike import check_alike, check_optimizers_alike, told
from parallel_core.answering import answering, is_bare, settled
from parallel_core.config import DistributedConfigBase
from parallel_core.errors import TrainingError, WrapError
from parallel_core.optimizer_state import optimizer_told, options_told
from parallel_core.record import Record, attach, bare_parameters
from parallel_core.report import measured_report
from parallel_core.starting import FirstValues, start_bare
from parallel_core.strategy import Strategy, bare_model_strategy, bound_strategy
from parallel_core.wrapping import (
    check_not_forgotten,
    check_optimizer,
    check_wrap,
    chosen_device,
    log_declined,
)

if TYPE_CHECKING:
    from parallel_core.config import DistributedConfig

logger = logging.getLogger(__name__)


def wrap_model_for_training(
    model: nn.Module,
    config: DistributedConfig,
    *,
    device: torch.device | str | None = None,
    state_dict: Mapping[str, Any] | None = None,
) -> nn.Module | None:
    """Wrap a model with the strategy that the config names.

    Args:
        model: the bare model, the same on every rank; its values are compared, or taken from rank 0. Built under
            `torch.device("meta")` it has none, and each module gets them from its `reset_parameters`.
        config: the settings, the same on every rank.
        device: where this rank trains; by default its accelerator, or the CPU.
        state_dict: a full state dict to take the values from instead: rank 0's, and the other ranks may pass `{}` or
            None. It must fit as it does in `load_model_state_dict`.

    Returns:
        The wrapped model; or None where the strategy has nothing to do, as with a single process, and then the model is
        as it was and stays where it was. A model that needs values, from the meta device or from `state_dict`, gets
        them there too, and is returned bare, on the device.

    Raises:
        StrategyError: the strategy is not installed, or broken.
        WrapError: the strategy can't honour the config for this model on this device, or nothing gives values to some
            tensor on the meta device; the same error on every rank, and the model is as it was. Also where a launcher
            started several ranks, and they have not joined a process group.
        StateDictError: `state_dict` does not fit; the same error on every rank, and the model is as it was.
    """
    with ranks.comparison(WrapError) as ranks_told:
        if not isinstance(config, DistributedConfigBase):
            raise WrapError(f"expected a DistributedConfig, found {type(config).__name__}; load_config makes one")
        strategy = bound_strategy(config.parallel_strategy)
        device = chosen_device(device, config)
        applies = strategy.applies(ranks.world_size(), device)
        ranks_told.mine = told(config, device, state_dict, applies=applies)
    check_alike(ranks_told.by_rank)
    first_values = FirstValues(ranks_told.by_rank[0].has_state, state_dict)
    if not applies:
        check_not_forgotten()
        log_declined(strategy, config, device)
        return start_bare(model, device, first_values)
    plan = check_wrap(model, strategy, config, device, first_values)
    with ranks.agreement(WrapError):
        wrapped = first_values.wrap(model, plan.layout, strategy, config.options, device)
    report = measured_report(plan.report, wrapped, device)
    attach(Record(strategy, config, plan.layout, report, plan.earlier_optimizers), wrapped, bare=model)
    first_values.load(strategy, wrapped, plan.layout)
    return wrapped


def wrap_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer to train with, made ready by the model's strategy.

    Its step raises a `TrainingError` where gradients were accumulated under `no_sync` and never synchronised.

    Raises:
        WrapError: the optimizer was made before the wrap, holds parameters that are not the model's, or is another one
            on another rank; the same error on every rank.
    """
    if is_bare(model):  # it may be one rank's own
        record, strategy = None, bare_model_strategy()
        check_optimizer(model, optimizer, record)
        if ranks.world_size() > 1:
            logger.warning(
                "wrap_optimizer: this %s is not wrapped, and nothing averages its gradients over the %d ranks; pass "
                "what wrap_model_for_training returned",
                type(model).__name__,
                ranks.world_size(),
            )
    else:
        with ranks.comparison(WrapError) as optimizers:
            record, strategy, model = settled(model)
            check_optimizer(model, optimizer, record)
            optimizers.mine = optimizer_told(optimizer, bare_parameters(model)) | options_told(optimizer)
        check_optimizers_alike(optimizers.by_rank)
    options = strategy.config_class() if record is None else record.config.options
    answer = strategy.wrap_optimizer(model, optimizer, options)
    if record is not None:
        # A forward between the backward and the step may have left something gathered, which a step makes out of date.
        answer.register_step_pre_hook(lambda *_: strategy.settle(model))
        answer.register_step_pre_hook(lambda *_: _check_synchronised(strategy, model))
    return answer


def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale the gradients so that their norm over the whole model is at most `max_norm`.

    Args:
        model: the model.
        max_norm: from 0 on; the same on every rank, as it is not compared.
        norm_type: the p of the p-norm, infinity too; likewise.

    Returns:
        The norm before clipping: a plain tensor without dimensions, the same on every rank.

    Raises:
        TrainingError: gradients were accumulated under `no_sync` and never synchronised, or are sparse; or one of the
            two is no such number.
    """
    limit, power = _number("max_norm", max_norm), _number("norm_type", norm_type)
    if limit < 0:
        raise TrainingError(
            f"max_norm: expected a number from 0 on, found {max_norm!r}, which would turn the step back"
        )
    _, strategy, model = settled(model)
    _check_synchronised(strategy, model)
    return strategy.clip_grad_norm(model, limit, power)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager under which backward passes accumulate gradients without communication.

    Run the forward and the backward pass inside: which of the two decides is the strategy's affair. The first backward
    pass outside of it makes the gradients the mean over the ranks of what each has accumulated.
    """
    _, strategy, model = answering(model)
    return strategy.no_sync(model)


def grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    """Return the gradient scaler for this model: enabled where it trains in fp16; elsewhere it does nothing."""
    _, strategy, model = answering(model)
    return strategy.grad_scaler(model)


def data_parallel(model: nn.Module) -> tuple[int, int]:
    """Return `(index, count)`: this rank reads share `index` of the data cut into `count`."""
    _, strategy, model = answering(model)
    return strategy.data_parallel(model)


def _number(name: str, value: Any) -> float:
    is_number = isinstance(value, numbers.Real | torch.Tensor) and not isinstance(value, bool)
    try:
        number = float(value) if is_number else math.nan
    except (RuntimeError, ValueError, OverflowError):  # a tensor of several elements, an integer that is too large
        number = math.nan
    if math.isnan(number):
        raise TrainingError(f"{name}: expected a number, found {value!r:.80}")
    return number


def _check_synchronised(strategy: Strategy, model: nn.Module) -> None:
    """Refuse gradients that are not the mean over the ranks; not a collective, as every rank finds the same."""
    if strategy.has_unsynchronised_gradients(model):
        raise TrainingError(
            "gradients were accumulated under no_sync and never synchronised; run the last micro-batch outside of "
            "no_sync, or zero the gradients"
        )
