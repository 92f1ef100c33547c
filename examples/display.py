"""What the training script shows: a progress bar, and a table of who holds what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table


@contextmanager
def progress(console: Console, steps: range, every: int) -> Iterator[Callable[[int, float, int], None]]:
    """Give a function `report(step, loss, tokens)` to call after each step.

    On a terminal it moves a bar; elsewhere, where a bar is nothing but noise, it prints a line every `every` steps.
    """
    shows_bar = console.is_terminal and not console.quiet
    bar = Progress(
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.fields[status]}"),
        console=console,
        disable=not shows_bar,
    )
    task = bar.add_task("", completed=steps.start, total=steps.stop, status="")
    begun, all_tokens = time.monotonic(), 0

    def report(step: int, loss: float, tokens: int) -> None:
        nonlocal all_tokens
        all_tokens += tokens
        done, elapsed = step + 1, time.monotonic() - begun
        left = timedelta(seconds=round(elapsed * (steps.stop - done) / (done - steps.start)))
        status = f"loss {loss:.4f}  {all_tokens / elapsed:,.0f} tokens/s  {left} left"
        if shows_bar:
            bar.update(task, completed=done, status=status)
        elif step == steps.start or done % every == 0 or done == steps.stop:
            console.print(f"step {done}/{steps.stop}  {status}", highlight=False)

    with bar:
        yield report


def parameter_table(strategy: str, whole: int, held: Sequence[tuple[str, int]]) -> Table:
    """Return the table of the parameters that each rank holds.

    Args:
        strategy: its name, for the title.
        whole: how many parameters the model has.
        held: by rank, its device and how many of the parameters lie there.
    """
    title = f"{whole:,} parameters, strategy {strategy}, {len(held)} rank{'s' * (len(held) > 1)}"
    table = Table("rank", "device", box=box.SIMPLE, title=title, title_style="bold")
    table.add_column("parameters held", justify="right")
    table.add_column("of the whole", justify="right")
    for rank, (device, count) in enumerate(held):
        table.add_row(str(rank), device, f"{count:,}", f"{count / whole:.1%}")
    return table
