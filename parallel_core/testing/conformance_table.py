"""The table at the end of a test run: which strategy keeps which clause of the contract."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

#: The name under which a test of the kit carries its strategy and clause to where the results are put together; with
#: pytest-xdist that is another process.
PROPERTY = "parallel_core_clause"

KEPT, LACKS, BROKEN = "kept", "lacks", "BROKEN"


def mark(item: pytest.Item) -> None:
    """Note on a test which clause it is, and of which strategy, if it is one of the kit's."""
    owner = getattr(item, "cls", None)
    strategy = getattr(owner, "strategy", None)
    if owner is None or strategy is None or _asks_nothing(item):
        return
    for base in owner.__mro__:
        name = getattr(item, "originalname", item.name)
        if base.__module__.startswith("parallel_core.testing.conformance.") and name in vars(base):
            item.user_properties.append((PROPERTY, f"{strategy}:{name}"))
            return


def _asks_nothing(item: pytest.Item) -> bool:
    """Tell a clause on what a strategy declares, of a strategy that declares nothing of the kind."""
    reasons = [str(mark.kwargs.get("reason", "")) for mark in item.iter_markers("skip")]
    return any(reason.startswith("got empty parameter set") for reason in reasons)


def results(reports: Iterable[pytest.TestReport]) -> dict[str, dict[str, str]]:
    """Return what became of each clause, by clause and strategy; a clause is kept where all its tests have passed."""
    table: dict[str, dict[str, str]] = {}
    for report in reports:
        for key, value in report.user_properties:
            if key != PROPERTY:
                continue
            strategy, clause = str(value).split(":")
            before = table.setdefault(clause, {}).get(strategy, KEPT)
            verdict = {"failed": BROKEN, "skipped": LACKS}.get(report.outcome, KEPT)
            table[clause][strategy] = max(before, verdict, key=[KEPT, LACKS, BROKEN].index)
    return table


def lines(table: dict[str, dict[str, str]]) -> list[str]:
    """Return the table as text, a line for each clause and a column for each strategy."""
    strategies = sorted({strategy for row in table.values() for strategy in row})
    clauses = {clause: clause.removeprefix("test_").replace("_", " ") for clause in table}
    width = max(map(len, clauses.values()))
    columns = [max(len(strategy), len(BROKEN)) for strategy in strategies]
    head = "  ".join(strategy.ljust(size) for strategy, size in zip(strategies, columns, strict=True))
    body = [
        f"{text.ljust(width)}  "
        + "  ".join(table[clause].get(name, "-").ljust(size) for name, size in zip(strategies, columns, strict=True))
        for clause, text in clauses.items()
    ]
    return [line.rstrip() for line in ("clause".ljust(width) + "  " + head, *body)]
