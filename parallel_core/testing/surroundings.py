"""What a call finds around it on a rank, as it is around the test, and its undoing."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from parallel_core.testing.protocol import Call


@contextmanager
def surroundings(call: Call) -> Iterator[None]:
    """Put a call's environment, working directory, ``sys.path`` and filters for warnings in place while it runs."""
    environment, directory, search_path = dict(os.environ), Path.cwd(), list(sys.path)
    with warnings.catch_warnings():
        try:
            _replace_environment(call.environment)
            os.chdir(call.directory)
            sys.path[:] = call.search_path
            _replace_filters(call.filters)
            yield
        finally:
            _replace_environment(environment)
            with suppress(OSError):  # the test may have removed it
                os.chdir(directory)
            sys.path[:] = search_path


def _replace_environment(environment: dict[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)


def _replace_filters(filters: list[tuple[Any, ...]]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, line in filters:
        warnings.filterwarnings(
            action,
            message=_expression(message),
            category=category,
            module=_expression(module),
            lineno=line,
            append=True,
        )


def _expression(entry: Any) -> str:
    """Return the regular expression of an entry of ``warnings.filters``, compiled there, or None, or a plain name."""
    if entry is None:
        return ""
    return rf"{re.escape(entry)}\Z" if isinstance(entry, str) else str(entry.pattern)
