"""Reads what faulthandler writes about a rank that hangs."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

CALLER = "answer_of"
"""The worker's function that calls the test's function: what lies below it in a stack is the worker's own."""
WATCHER = "die_with_the_pool"
"""The function of the worker's own thread."""

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$')
_THREAD = re.compile(r"^(?=(?:Current thread|Thread) )", flags=re.MULTILINE)
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def place(stacks: str) -> str:
    """Say where the thread that ran the function was: in which line of code that is not installed, and below that."""
    frames = next((frames for thread in _THREAD.split(stacks) if (frames := _frames_of_the_call(thread))), [])
    if not frames:
        return "at an unknown place: the process did not answer"
    inner = frames[0]
    own = next((frame for frame in frames if not frame[0].startswith(_INSTALLED)), inner)
    text = f"at {own[0]}:{own[1]} in {own[2]}"
    return text if own == inner else f"{text} (inside {inner[2]}, {Path(inner[0]).name}:{inner[1]})"


def shortened(stacks: str) -> str:
    """Leave out the worker's own frames and thread; the thread that ran the function comes first."""
    threads: list[str] = []
    for thread in _THREAD.split(stacks):
        if _frames_of_the_call(thread):
            lines = thread.splitlines()
            end = next(i for i, line in enumerate(lines) if line.endswith(f" in {CALLER}"))
            threads.insert(0, "\n".join(lines[:end]))
        elif thread.strip() and f" in {WATCHER}\n" not in thread:
            threads.append(thread.rstrip())
    return "\n\n".join(threads)


def _frames_of_the_call(thread: str) -> list[tuple[str, str, str]]:
    """Return (file, line, function) of the function's frames, innermost first; empty for another thread."""
    frames = [(m["file"], m["line"], m["function"]) for line in thread.splitlines() if (m := _FRAME.match(line))]
    names = [function for _, _, function in frames]
    return frames[: max(names.index(CALLER), 1)] if CALLER in names else []
