"""Commands, run as a user would run them: away from this test run, its ranks and its settings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

#: Seconds; many times what a command takes on two slow cores: it ends a hang and measures nothing.
COMMAND_LIMIT = 120
#: The same for the whole test suite of a strategy.
SUITE_LIMIT = 600

# What would lead a process back to this test run, its source tree or its ranks, or to a user's own settings.
_LEAKING = re.compile(r"PYTHON|COV|PYTEST|PARALLEL_CORE|VIRTUAL_ENV|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_\w+)$")


def clean_environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what leaks from the test run, and with some more variables."""
    kept = {name: value for name, value in os.environ.items() if not _LEAKING.match(name)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"} | more


def run(*command: str | Path, cwd: Path, limit: float = COMMAND_LIMIT, **variables: str) -> str:
    """Run a command to its end and return what it printed; fail with that where it fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=clean_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def python(*command: str | Path, cwd: Path, limit: float = COMMAND_LIMIT, **variables: str) -> str:
    """Run this interpreter with some arguments, as `run` does."""
    return run(sys.executable, *command, cwd=cwd, limit=limit, **variables)


def install(source: Path, site: Path) -> None:
    """Install a distribution from its sources into a folder, as pip does."""
    # Without isolation and dependencies: the build backend and the core are here already, nothing is downloaded.
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    python("-m", "pip", "install", *options, "--target", site, source, cwd=source)
