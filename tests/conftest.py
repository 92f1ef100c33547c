"""Fake strategies, installed as real distributions, so that the core's tests need none of the real ones."""

from __future__ import annotations

import importlib
import importlib.metadata
import signal
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parallel_core.hookspecs import ENTRY_POINT_GROUP
from parallel_core.testing import Ranks
from tests.discovery import clear_caches, look_again

SOURCE = """
from enum import Enum
from typing import Annotated, Literal
from msgspec import Meta
from parallel_core.hookspecs import hookimpl
from parallel_core.strategy_config import StrategyConfig

class FakeConfig(StrategyConfig):
{settings}

@hookimpl
def strategy_config():
    return FakeConfig

@hookimpl
def wrap_model(model, config, device):
    return model
"""

DDP = """
find_unused_parameters: bool = False
gradient_as_bucket_view: bool = True
static_graph: bool = False
bucket_cap_mb: Annotated[float, Meta(gt=0)] | None = None
broadcast_buffers: bool = True
"""

FSDP = """
mixed_precision: Literal["fp32", "bf16", "fp16"] = "bf16"
auto_wrap_min_params: Annotated[int, Meta(ge=0)] = 10_000_000
cpu_offload: bool = False
sync_module_states: bool = True
"""


# pytest-xdist hands out whole files in the order in which they were collected. The longest come first, so that the
# last one is short; the workers then take turns at whatever is left.
LONGEST = (
    *("test_packaging.py", "test_conformance_catches.py", "test_suites_of_authors.py", "test_train_lm.py"),
    *("test_ranks_lifetime.py", "test_contents.py", "test_optimizers.py", "test_killed.py", "test_moving_state.py"),
    *("test_background.py", "test_saving.py", "test_matrix.py", "test_ranks_failing.py", "test_code_blocks.py"),
)


def pytest_configure() -> None:
    """Take Ctrl-C again where it is ignored, as in `make test &`: processes inherit that, and tests send it to some."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; within a file, and among the others, the order stays."""
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture
def visible(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path, str], None]]:
    """Make a strategy that is installed in a folder visible to the test and to all ranks: `visible(site, module)`."""
    shown: list[str] = []

    def everywhere() -> None:
        look_again(*shown)
        ranks(look_again, *shown, world_size=3, process_group=False)

    def show(site: Path, module: str) -> None:
        monkeypatch.syspath_prepend(str(site))
        shown.append(module)
        everywhere()

    yield show
    monkeypatch.undo()
    everywhere()


@pytest.fixture
def only_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Hide every installed strategy, and give the folder in which the fake ones are installed."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def distributions() -> object:
        return importlib.metadata.Distribution.discover(path=[str(site)])

    monkeypatch.setattr(importlib.metadata, "distributions", distributions)
    modules = set(sys.modules)
    clear_caches()
    yield site
    clear_caches()
    for module in set(sys.modules) - modules:
        if module.startswith("fake_"):
            del sys.modules[module]


@pytest.fixture
def install_strategy(only_fakes: Path) -> Callable[..., str]:
    """Install a fake strategy: `install_strategy(name, plugin=..., settings=..., ...) -> the module's name`.

    Arguments of what it gives:
        name: the entry point's name.
        plugin: the text of the strategy's module, or any object to be found as the module's attribute `plugin`.
        settings: the fields of its struct, in place of `plugin`; both hooks that a strategy must have come with them.
        distribution, version: what is installed; a second strategy of one distribution is added to it.
        entry_point: what follows the module's name in the entry point, such as `:Plugin`.
    """
    written: dict[str, list[str]] = {}

    def install(
        name: str,
        plugin: object = None,
        *,
        settings: str = "",
        distribution: str = "pc-fake",
        version: str = "1.0",
        entry_point: str = "",
    ) -> str:
        module = f"fake_{name}_{distribution}".replace("-", "_").replace(".", "_")
        if plugin is None:
            plugin = SOURCE.format(settings=textwrap.indent(textwrap.dedent(settings) or "pass", "    "))
        if isinstance(plugin, str):
            (only_fakes / f"{module}.py").write_text(textwrap.dedent(plugin))
        else:
            sys.modules[module] = types.ModuleType(module)
            vars(sys.modules[module])["plugin"] = plugin
            entry_point = ":plugin"
        entries = written.setdefault(distribution, [f"[{ENTRY_POINT_GROUP}]"])
        entries.append(f"{name} = {module}{entry_point}")
        folder = only_fakes / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (folder / "entry_points.txt").write_text("\n".join(entries))
        importlib.invalidate_caches()
        clear_caches()
        return module

    return install


@pytest.fixture
def ddp_and_fsdp(install_strategy: Callable[..., str]) -> None:
    """Install fakes that have the settings of the real ddp and fsdp, under their names."""
    install_strategy("ddp", settings=DDP, distribution="parallel-core-ddp", version="0.1.0")
    install_strategy("fsdp", settings=FSDP, distribution="parallel-core-fsdp", version="0.1.0")
