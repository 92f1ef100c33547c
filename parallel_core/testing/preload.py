"""The import of torch in the least time, for processes whose time it is most of."""

from __future__ import annotations

import gc
import importlib

# What every rank comes to import: for its process group, for shards, and at the first step of an optimizer.
_MODULES = ("torch", "torch.distributed", "torch.distributed.tensor", "torch._dynamo")


def import_torch() -> None:
    """Import what every rank comes to import, and let no collection of garbage look through it, now or later."""
    gc.disable()  # to look while all of this is imported would take a sixth of the time
    for module in _MODULES:
        importlib.import_module(module)
    gc.freeze()  # to look through all of torch in a forked process would copy its memory too
    gc.enable()
