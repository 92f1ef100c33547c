"""Which strategy answers for a model."""

from __future__ import annotations

from torch import nn

from parallel_core.errors import WrapError
from parallel_core.names import uncompiled
from parallel_core.record import Record, find_record
from parallel_core.strategy import Strategy, bare_model_strategy


def answering(model: nn.Module) -> tuple[Record | None, Strategy, nn.Module]:
    """Return a model's record, the strategy that answers for it, and the model outside of `torch.compile`."""
    record = find_record(model)
    strategy = bare_model_strategy() if record is None else record.strategy
    return record, strategy, model if record is None else uncompiled(model)


def is_bare(model: nn.Module) -> bool:
    """Return whether a model is a bare one, with no wrapped part and not a part of a wrapped one."""
    try:
        return find_record(model) is None
    except WrapError:
        return False


def settled(model: nn.Module) -> tuple[Record | None, Strategy, nn.Module]:
    """Return what `answering` does, of a model whose parameters are what they are between two steps."""
    record, strategy, model = answering(model)
    if record is not None:
        strategy.settle(model)
    return record, strategy, model
