"""The messages between the pool and its workers: what both sides know about each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

READY = b"ready"
"""The worker's first message: it has imported torch and waits for calls."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One function to run on one rank.

    ``function`` is the pickled ``(function, args, kwargs)``. ``store`` is the file through which the ranks meet, or
    None for no process group. ``filters`` are entries of ``warnings.filters``. ``timeout`` is in seconds. ``coverage``
    says how coverage is measured during the call, empty for not at all.
    """

    rank: int
    world_size: int
    function: bytes
    environment: dict[str, str]
    directory: str
    search_path: list[str]
    filters: list[tuple[Any, ...]]
    timeout: float
    backend: str
    store: str | None
    coverage: str


@dataclass(frozen=True)
class Returned:
    """The function returned; ``value`` is pickled."""

    value: bytes


@dataclass(frozen=True, kw_only=True)
class Raised:
    """The function raised; ``exception`` is pickled, or None where it can't be."""

    error_type: str
    message: str
    traceback: str
    exception: bytes | None


@dataclass(frozen=True)
class Died:
    """Put by the pool in the place of a message from a worker that is gone."""


@dataclass(frozen=True)
class Settle:
    """Every rank has answered: destroy the process group and say what the function left behind."""


@dataclass(frozen=True)
class Settled:
    """The rank is clean again, but for ``leftovers``, each a line to be read by a person."""

    leftovers: tuple[str, ...]


@dataclass(frozen=True)
class Leave:
    """End the worker in an orderly way."""


Answer = Returned | Raised | Died
