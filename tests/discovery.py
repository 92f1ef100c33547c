"""Which strategies this process has found, to be found anew after one was installed or hidden."""

from __future__ import annotations

import importlib
import sys

from parallel_core.registry import registrations
from parallel_core.strategy import bound_strategy


def clear_caches() -> None:
    """Forget which strategies were found and loaded."""
    registrations.cache_clear()
    bound_strategy.cache_clear()


def look_again(*modules: str) -> None:
    """Make this process find the strategies that are on its path now, and forget some modules."""
    importlib.invalidate_caches()
    clear_caches()
    for module in modules:
        sys.modules.pop(module, None)
