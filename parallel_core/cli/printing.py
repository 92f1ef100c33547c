"""How the command shows things: tables, and how far a long piece of work is."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from parallel_core.errors import ParallelCoreError

_ENDED_BY_SIGPIPE = 128 + 13  # as a shell has it
_WIDEST = 10_000  # columns of a table that goes to a file or another command


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise  # what rich is handling; by itself it would exit with 1, which has a meaning here


def print_table(header: Iterable[str], rows: Iterable[Iterable[str]], *, title: str = "") -> None:
    """Print a table on stdout; without a header, its columns have no names."""
    names = tuple(header)
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(names))
    for name in names:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # as Text: what stands in [brackets] would be read as a style
    for column in table.columns:
        column.overflow = "fold"
    console = _Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = _Console(width=_WIDEST)  # a name that is cut in two can't be searched for
    if title:
        console.print(Text(f"\n{title}", style="bold"))
    console.print(table)


@contextmanager
def printed() -> Iterator[None]:
    """Run a block that prints, in whatever letters stdout has, to the end of it.

    Raises:
        ParallelCoreError: stdout takes no more, as on a full disk.
        SystemExit: the command behind a pipe has ended, and has read all that it wanted (`| head`).
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        if sys.stdout is not None:  # it is, where the command was started without one
            sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:  # another file than stdout
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more as it ends
        if isinstance(error, BrokenPipeError):
            raise SystemExit(_ENDED_BY_SIGPIPE) from None
        raise ParallelCoreError(f"the output can't be written: {error.strerror}") from error


def printable(text: str) -> str:
    """Return a text that takes one line and can't command a terminal: names in a file may come from anyone."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


@contextmanager
def progress_bars() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """Return what makes a bar, by its label: it is told the bytes that are done, and those that there are in all.

    Bars are for a terminal, on stderr; elsewhere there are none.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:

        def bar(label: str) -> Callable[[int, int], None]:
            task: TaskID | None = None

            def told(done: int, total: int) -> None:
                nonlocal task
                if task is None:  # not before: work that is left out has no bar
                    task = progress.add_task(label, total=total)
                progress.update(task, completed=done)

            return told

        yield bar
