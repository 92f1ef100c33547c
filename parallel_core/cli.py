"""The command `parallel-core`: which strategies are installed, and what a configuration comes to. Without torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from parallel_core.config import trace_config
from parallel_core.errors import ParallelCoreError
from parallel_core.registry import describe_installed
from parallel_core.strategy import available_strategies

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, or 2 where the arguments or the configuration are not valid."""
    parser = _parser()
    # argparse gives up on settings that stand after an option that stands after the file.
    options, rest = parser.parse_known_args(arguments)
    if any(argument.startswith("-") or options.command != "config" for argument in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if options.command == "strategies":
            show_strategies()
        else:
            show_config([*options.settings, *rest], options.table)
    except ParallelCoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def show_strategies() -> None:
    """Print every installed strategy, and of each that can't be used why."""
    found = available_strategies()
    if not found:
        print(describe_installed())
        return
    rows = [(each.name, each.distribution, each.version, str(each.error or "ready")) for each in found]
    _print_table(("name", "distribution", "version", "status"), rows)


def show_config(settings: Sequence[str], table: str | None) -> None:
    """Print every setting with its value, as an override would write it, and where that came from.

    Args:
        settings: overrides; the first one is a file if it has no `=`.
        table: the table of the file that holds the settings.

    Raises:
        ConfigError: the configuration is not valid.
    """
    has_file = bool(settings) and "=" not in settings[0]
    file, overrides = (settings[0], settings[1:]) if has_file else (None, settings)
    traced = trace_config(file, table, overrides=overrides)
    rows = [(each.name, json.dumps(msgspec.to_builtins(each.value)), each.origin) for each in traced]
    _print_table(("setting", "value", "where it came from"), rows)


def _print_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # as Text: what stands in [brackets] would be read as a style
    Console().print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="parallel-core", description="Look at strategies and configurations.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("strategies", help="list the installed strategies, and what is wrong with any of them")
    config = commands.add_parser("config", help="check a configuration, and say where each value came from")
    config.add_argument(
        "settings",
        nargs="*",
        metavar="FILE | NAME=VALUE",
        help="a file in TOML, YAML or JSON first, if any, then settings that override it and the environment",
    )
    config.add_argument("--table", help="the table of the file that holds the settings; by default its top")
    return parser


if __name__ == "__main__":
    sys.exit(main())
