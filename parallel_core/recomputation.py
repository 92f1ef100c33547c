"""Activation checkpointing: a module's forward is computed again in its backward, instead of what it made being kept.

For strategy authors. It is torch's `checkpoint_wrapper`, without reentrance; the wrapper adds nothing to the names of
state dicts, and `parallel_core.names` knows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper

from parallel_core.units import Unit

__all__ = ["recompute_units"]


def recompute_units(model: nn.Module, units: Sequence[Unit]) -> list[nn.Module]:
    """Put every unit of a model into a wrapper that computes it again in the backward pass; changes the model in place.

    Args:
        model: the bare model.
        units: its units, as `parallel_core.units.choose_units` returns them.

    Returns:
        the modules that now stand in the units' places, in the same order.
    """
    standing: list[nn.Module] = []
    # From the inside out: the names of inner units lead through the outer ones as they are now.
    for unit in reversed(units):
        module = unit.module
        if not isinstance(module, CheckpointWrapper):
            # Only where there are buffers: the compiler takes no context of our own into a recomputed part.
            has_buffers = any(True for _ in module.buffers())
            options: dict[str, Any] = {"context_fn": partial(_contexts, module)} if has_buffers else {}
            is_training = module.training
            module = checkpoint_wrapper(module, **options)
            module.training = is_training  # the wrapper's own; a call of train() would reach the module inside
            parent, _, child = unit.name.rpartition(".")
            setattr(model.get_submodule(parent), child, module)
        standing.append(module)
    return standing[::-1]


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first computation and of the second."""
    before: list[tuple[nn.Module, str, Tensor]] = []
    return _keeping_buffers(module, before), _with_buffers(before)


@contextmanager
def _keeping_buffers(module: nn.Module, before: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Note the buffers as they are before the first forward."""
    before.extend(
        (owner, name, buffer.clone())
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    )
    yield


@contextmanager
def _with_buffers(before: list[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    """Compute from the buffers that the first forward had, and leave those that it has made as they are.

    A spectral norm would compute another function from what it has made, and a BatchNorm would count every batch twice.
    """
    made = [(owner, name, owner._buffers[name]) for owner, name, _ in before]
    for owner, name, buffer in before:
        owner._buffers[name] = buffer.clone()  # a graph that is kept may be walked through again
    try:
        yield
    finally:
        for owner, name, found in made:
            owner._buffers[name] = found
