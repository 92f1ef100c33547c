"""Coverage on ranks: measured while the test's own process measures, and as that does."""

from __future__ import annotations

import importlib
import os
import sys
import time
from typing import Any

_SAVE_EVERY = 10.0  # seconds


def wanted() -> str:
    """Return how this process measures coverage now, as coverage.py writes it for others; empty if it does not."""
    current = _current()
    if current is None:
        return ""
    parallel = current.get_option("run:parallel")
    current.set_option("run:parallel", True)  # each process writes a file of its own, which the run combines at its end
    try:
        return str(current.config.serialize())
    finally:
        current.set_option("run:parallel", parallel)


class Measuring:
    """The coverage of a worker; what its template has begun goes on, into a file of the worker's own."""

    def __init__(self) -> None:
        self._coverage = _current()
        self._runs = self._coverage is not None
        self._saved = time.monotonic()

    def follow(self, wanted: str) -> None:
        """Measure from now on, or no longer.

        Args:
            wanted: how, from `wanted`; empty to pause, as pytest-cov does for tests that are marked `no_cover`.
        """
        if wanted and self._coverage is None:
            self._coverage = begin(wanted)
        elif wanted and not self._runs:
            self._coverage.start()
        elif self._runs and not wanted:
            self._coverage.stop()
        self._runs = bool(wanted)

    def save(self) -> None:
        """Save now and then, so that a worker which is killed loses little; each time would double its time."""
        if self._coverage is not None and time.monotonic() > self._saved + _SAVE_EVERY:
            self._coverage.save()
            self._saved = time.monotonic()


def begin(wanted: str) -> Any:
    """Begin to measure this process, until it ends."""
    os.environ["COVERAGE_PROCESS_CONFIG"] = wanted
    return importlib.import_module("coverage").process_startup()


def _current() -> Any:
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage is not None else None
