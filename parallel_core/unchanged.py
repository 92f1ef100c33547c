"""Whether a wrapped model has the parameters and buffers that it had when it was wrapped."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from torch import nn

from parallel_core.errors import StateDictError

if TYPE_CHECKING:
    from parallel_core.record import Layout


def check_unchanged(model: nn.Module, layout: Layout) -> None:
    """Refuse a wrapped model that has more or fewer parameters or persistent buffers than when it was wrapped.

    Raises:
        StateDictError: something was added to it, or taken away.
    """
    before, now = Counter(layout.buffers), Counter(persistent_buffers(model))
    changes = [f"the buffer {name!r} was added" for name in now - before]
    changes += [f"the buffer {name!r} was taken away" for name in before - now]
    count = sum(1 for _ in model.parameters())
    if count != len(layout.parameters):
        changes.append(f"it had {len(layout.parameters)} parameters and has {count}")
    if changes:
        raise StateDictError(
            f"the model has changed since it was wrapped: {'; '.join(changes[:5])}; give it all its parameters and "
            f"buffers before the wrap (register_buffer with None registers nothing yet)"
        )


def persistent_buffers(model: nn.Module) -> tuple[str, ...]:
    """Return the own names of the buffers that are saved: those that no wrapper changes."""
    return tuple(
        name
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    )
