"""The skeleton of a strategy: a distribution that works as it is written, for an author to start from.

What is written lies in `template/`, a file for each file of the distribution.
"""

from __future__ import annotations

import keyword
import os
import re
import tempfile
from pathlib import Path
from string import Template

from parallel_core import __version__
from parallel_core.errors import StrategyError
from parallel_core.registry import STRATEGY_NAME, registrations

__all__ = ["write_skeleton"]

#: The files of a distribution, each with the file in `template/` that it is made from.
FILES = {
    "pyproject.toml": "pyproject.toml.template",
    "README.md": "README.md.template",
    "parallel_core_$name.py": "strategy.py.template",
    "tests/test_conformance.py": "test_conformance.py.template",
}


def write_skeleton(name: str, folder: Path | None = None) -> list[Path]:
    """Write the distribution of a new strategy: plain data parallelism, to be changed into what it shall be.

    Args:
        name: the strategy's name.
        folder: the folder to make, in one that is there; by default `parallel-core-<name>` in the working directory.

    Returns:
        the files written.

    Raises:
        StrategyError: the name is not valid or not free, or the folder can't be made; nothing is written then.
    """
    check_new_name(name)
    folder = Path(f"parallel-core-{name}") if folder is None else folder
    if os.path.lexists(folder):  # a link that leads nowhere counts too
        raise StrategyError(f"{folder} is there already, and nothing is overwritten; name another with --folder")
    values = {"name": name, "class_name": name.capitalize(), "core": _requirement()}
    texts = {Template(path).substitute(values): _template(source).substitute(values) for path, source in FILES.items()}
    try:
        if not folder.parent.is_dir():
            raise StrategyError(
                f"there is no folder {folder.parent} to make {folder.name} in; make it, or name another"
            )
        # Made beside its place and moved there: the folder is there with all of its files, or not at all.
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
            made = Path(temporary, folder.name)
            for path, text in texts.items():
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).write_text(text, encoding="utf-8")
            made.rename(folder)
    except (OSError, ValueError) as error:  # a ValueError is a name that no folder can have
        raise StrategyError(f"{folder} can't be written: {error}; name another with --folder") from error
    return [folder / path for path in texts]


def check_new_name(name: str) -> None:
    """Refuse what can't be the name of a new strategy here.

    Raises:
        StrategyError: the name is not valid, or is taken.
    """
    if not STRATEGY_NAME.fullmatch(name):
        near = re.sub(r"[^a-z0-9]", "", name.lower()).lstrip("0123456789")
        hint = f"; did you mean {near!r}?" if near else ""
        raise StrategyError(
            f"{name!r} can't be the name of a strategy: allowed are lower-case letters and digits, a letter first{hint}"
        )
    if keyword.iskeyword(name):
        raise StrategyError(f"{name!r} can't be the name of a strategy: it is a keyword of Python; choose another name")
    if claims := registrations().get(name):
        raise StrategyError(f"a strategy {claims[0]} is installed already; choose another name, or uninstall that one")


def _requirement() -> str:
    """Return the versions of the core that a strategy written today can ask for: the contract may change with each."""
    major, minor, *_ = __version__.split(".")
    return f">={major}.{minor},<{major}.{int(minor) + 1}"


def _template(source: str) -> Template:
    return Template(Path(__file__).with_name("template").joinpath(source).read_text(encoding="utf-8"))
