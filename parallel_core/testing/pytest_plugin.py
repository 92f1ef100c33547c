"""The pytest plugin: gives the fixture ``ranks``, and tells at the end which strategy keeps which clause.

pytest imports this module in every run of everyone who has parallel-core installed: it imports nothing but pytest.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Generator, Iterator
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from parallel_core.testing import conformance_table

if TYPE_CHECKING:
    from parallel_core.testing.fixture import Ranks

_COVERAGE = "ranks_coverage"
_UNMEASURED = pytest.StashKey[bool]()

# Failed assertions of the kit show their values, as those of the author's own tests do.
pytest.register_assert_rewrite("parallel_core.testing.conformance")


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Run functions on ranks: ``ranks(function, *args, world_size=2)`` returns the results by rank.

    The worker processes are started when first needed and serve the whole test run. See
    :class:`parallel_core.testing.Ranks`.
    """
    try:
        from parallel_core.testing.fixture import Ranks
    except ModuleNotFoundError as error:
        if error.name != "cloudpickle":
            raise
        pytest.fail(
            "the fixture 'ranks' needs cloudpickle, which is not installed: pip install 'parallel-core[testing]'",
            pytrace=False,
        )

    with Ranks(
        by_value=lambda: _modules_of_tests(request.session),
        measured=measured(request.config),
    ) as runner:
        yield runner


def measured(config: pytest.Config) -> Callable[[int], Collection[int]]:
    """Return what tells which ranks of a call measure coverage, by how many there are."""
    value = config.getini(_COVERAGE)
    if value not in ("all", "in turns"):
        raise pytest.UsageError(f"{_COVERAGE} is {value!r}: it must be 'all' or 'in turns'")
    turns = itertools.count()

    def ranks_of(world_size: int) -> Collection[int]:
        if config.stash.get(_UNMEASURED, False):
            return ()
        return range(world_size) if value == "all" else (next(turns) % world_size,)

    return ranks_of


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting of the fixture's."""
    parser.addini(_COVERAGE, "ranks that a call measures coverage on: 'all', or one of them, 'in turns'", default="all")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Note which tests are clauses of the conformance kit."""
    conformance_table.mark(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Note whether a test is not to be measured: under xdist, pytest-cov measures on, and drops what it finds."""
    marked = item.get_closest_marker("no_cover") is not None or "no_cover" in getattr(item, "fixturenames", ())
    item.config.stash[_UNMEASURED] = marked
    try:
        return (yield)
    finally:
        item.config.stash[_UNMEASURED] = False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the conformance table, if clauses have been run."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    table = conformance_table.results(report for report in reports if isinstance(report, pytest.TestReport))
    if table:
        terminalreporter.section("conformance")
        for line in conformance_table.lines(table):
            terminalreporter.write_line(line)


def _modules_of_tests(session: pytest.Session) -> list[ModuleType]:
    """Return the test modules and conftest modules: pytest loads them from their files, workers can't import them."""
    found = [getattr(item, "module", None) for item in session.items]
    found += [plugin for plugin in session.config.pluginmanager.get_plugins() if _is_conftest(plugin)]
    return list({id(module): module for module in found if isinstance(module, ModuleType)}.values())


def _is_conftest(plugin: object) -> bool:
    return isinstance(plugin, ModuleType) and (plugin.__file__ or "").endswith("conftest.py")
