"""The command `parallel-core`: what is installed, what a configuration comes to, a new strategy, and checkpoints.

Torch is imported only where tensors are computed with: importing it takes seconds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

import parallel_core
from parallel_core.cli import checkpoint
from parallel_core.cli.printing import print_table, printed
from parallel_core.config import trace_config
from parallel_core.errors import ParallelCoreError
from parallel_core.registry import describe_installed
from parallel_core.skeleton import write_skeleton
from parallel_core.strategy import available_strategies

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0; 1 where a checkpoint is damaged, or two of them differ; 2 where what it is given is not valid, or what it prints
    can't be written; 130 where it was interrupted. A reader of its output that has ended ends it with 141.
    """
    parser = _parser()
    # argparse gives up on settings that stand after an option that stands after the file.
    options, rest = parser.parse_known_args(arguments)
    if any(argument.startswith("-") or options.command != "config" for argument in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        with printed():
            match options.command:
                case "strategies":
                    show_strategies()
                case "config":
                    show_config([*options.settings, *rest], options.table)
                case "new-strategy":
                    new_strategy(options.name, options.folder)
                case "checkpoint":
                    return checkpoint.run(options)
    except ParallelCoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # as a shell has it of a command that ended by SIGINT
    return 0


def show_strategies() -> None:
    """Print every installed strategy, and of each that can't be used why."""
    found = available_strategies()
    if not found:
        print(describe_installed())
        return
    rows = [(each.name, each.distribution, each.version, str(each.error or "ready")) for each in found]
    print_table(("name", "distribution", "version", "status"), rows)


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
    print_table(("setting", "value", "where it came from"), rows)


def new_strategy(name: str, folder: Path | None) -> None:
    """Write the distribution of a new strategy, and print its files and what to do with them.

    Raises:
        StrategyError: the name or the folder can't be had; nothing is written.
    """
    written = write_skeleton(name, folder)
    root = written[0].parent
    print(f"wrote the strategy {name!r}:")
    for path in written:
        print(f"  {path}")
    print(f"next: pip install --editable {shlex.quote(f'{root}[testing]')} && pytest {shlex.quote(str(root))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parallel-core", description="Look at strategies, configurations and checkpoints; begin a strategy."
    )
    parser.add_argument("--version", action="version", version=f"parallel-core {parallel_core.__version__}")
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
    new = commands.add_parser("new-strategy", help="write the distribution of a new strategy, to start from")
    new.add_argument("name", metavar="NAME", help="the strategy's name: lower-case letters and digits, a letter first")
    new.add_argument("--folder", type=Path, metavar="DIR", help="the folder to make; by default parallel-core-NAME")
    checkpoint.add_parser(commands)
    return parser
