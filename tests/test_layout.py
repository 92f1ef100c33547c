"""The shape of the source tree: who may import whom, and what a module may be called and how long it may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import parallel_core

ROOT = Path(__file__).parents[1]
CORE = ROOT / "parallel_core"
PLUGINS = {path.name: path for path in sorted(ROOT.glob("plugins/*/parallel_core_*")) if path.is_dir()}

# Imports run one way: a module imports only what stands on a line above its own. A folder stands for all its modules.
ORDER = [
    ["dtypes", "errors", "hookspecs", "outputs"],
    ["field_types"],
    ["conversion"],
    ["strategy_config"],
    ["sharding_config"],
    ["messages"],
    ["agreeing"],
    ["names", "ranks"],
    ["tensors"],
    ["norms", "optimizer_probe", "tensor_checks", "unchanged", "units"],
    ["optimizer_state", "record"],
    ["parameter_checks", "recomputation"],
    ["sharding"],
    ["sharding_checks"],
    ["local_shards"],
    ["answers", "registry", "defaults"],
    ["binding"],
    ["strategy"],
    ["answering"],
    ["config_sources"],
    ["config_check"],
    ["config"],
    ["outlines"],
    ["state_dicts"],
    ["meta_model", "report_text"],
    ["alike", "filling", "meta"],
    ["report", "starting"],
    ["optimizer_state_dicts"],
    ["wrapping"],
    ["distributed", "training", "saving"],
    ["checkpoint"],
    ["__init__"],  # what users import; those below are written against it, as a user would
    ["skeleton"],
    ["cli"],
    ["testing"],
]
LEVELS = {module: level for level, modules in enumerate(ORDER) for module in modules}

# What a strategy may use of the core: its public names, and all that has no leading underscore in these modules.
FOR_STRATEGY_AUTHORS = {
    "dtypes",
    "local_shards",
    "meta",
    "names",
    "optimizer_state",
    "outputs",
    "parameter_checks",
    "ranks",
    "recomputation",
    "record",
    "sharding",
    "sharding_checks",
    "sharding_config",
    "tensor_checks",
    "tensors",
    "units",
}
PUBLIC_TO_PLUGINS = {"parallel_core", *(f"parallel_core.{module}" for module in FOR_STRATEGY_AUTHORS)}

LONGEST_MODULE = 250


def subject_of(path: Path) -> str:
    """Return the name under which ORDER has a core module: its own, or that of its folder."""
    return path.relative_to(CORE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, module, name) for every import that happens at run time, inside functions too; name may be ''.

    Imports for annotations alone (under `if TYPE_CHECKING`) are left out: nothing is imported there, so they can't
    make a cycle, and hookspecs has to name the types that stand above it.
    """
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import; name the module in full"
            yield from ((node.lineno, str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            todo.extend(node.orelse)
        else:
            todo.extend(ast.iter_child_nodes(node))


def core_module(module: str, name: str) -> str | None:
    """Return the core's module that `from module import name` needs, by its name in ORDER; None if it is not ours."""
    package, _, rest = module.partition(".")
    if package != "parallel_core":
        return None
    first = rest.partition(".")[0] or name
    is_module = (CORE / f"{first}.py").is_file() or (CORE / first).is_dir()
    return first if first and is_module else "__init__"


def is_private(dotted: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in dotted.split("."))


core_modules = pytest.mark.parametrize(
    "path", sorted(CORE.rglob("*.py")), ids=lambda path: path.relative_to(CORE).as_posix()
)
plugin_modules = pytest.mark.parametrize(
    ("plugin", "path"),
    [(plugin, path) for plugin, folder in PLUGINS.items() for path in sorted(folder.rglob("*.py"))],
    ids=lambda value: value.name if isinstance(value, Path) else value,
)


def test_the_order_names_no_module_that_is_not_there() -> None:
    gone = [name for name in LEVELS if not (CORE / f"{name}.py").is_file() and not (CORE / name).is_dir()]
    assert not gone, f"in ORDER, but not in parallel_core/: {gone}; take the names out"


@core_modules
def test_imports_in_the_core_run_one_way(path: Path) -> None:
    subject = subject_of(path)
    assert subject in LEVELS, f"{subject!r} has no place in ORDER; put it below all that it imports"
    wrong = []
    for line, module, name in imports_of(path):
        needed = core_module(module, name)
        within = needed == subject and path.parent != CORE  # modules of one folder may use each other
        if needed and not within and LEVELS.get(needed, len(ORDER)) >= LEVELS[subject]:
            wrong.append(f"{path.name}:{line} imports {needed!r}, which does not stand above {subject!r} in ORDER")
    assert not wrong, "\n".join(wrong)


@core_modules
def test_the_core_imports_no_plugin(path: Path) -> None:
    wrong = [
        f"{path.name}:{line} imports {module}" for line, module, _ in imports_of(path) if "parallel_core_" in module
    ]
    assert not wrong, "\n".join(wrong)


@plugin_modules
def test_a_plugin_imports_only_public_names_of_the_core_and_no_other_plugin(plugin: str, path: Path) -> None:
    wrong = []
    for line, module, name in imports_of(path):
        package = module.partition(".")[0]
        if package == plugin or not package.startswith("parallel_core"):
            continue
        if package != "parallel_core":
            wrong.append(f"{path.name}:{line} imports another plugin, {package}")
        # `from parallel_core import x` may mean a module; then it must be one of the public ones.
        elif core_module(module, name) == name:
            if f"{module}.{name}" not in PUBLIC_TO_PLUGINS:
                wrong.append(
                    f"{path.name}:{line} imports the module {module}.{name}, allowed are {sorted(PUBLIC_TO_PLUGINS)}"
                )
        elif module not in PUBLIC_TO_PLUGINS:
            wrong.append(f"{path.name}:{line} imports from {module}, allowed are {sorted(PUBLIC_TO_PLUGINS)}")
        elif is_private(name) or (module == "parallel_core" and name and name not in parallel_core.__all__):
            wrong.append(f"{path.name}:{line} imports {name} from {module}, which is not public")
    assert not wrong, "\n".join(wrong)


def test_no_module_bears_the_name_of_a_public_name() -> None:
    """A lazy package would hand out the module where the function is meant."""
    modules = {subject_of(path) for path in CORE.rglob("*.py")}
    assert not modules & set(parallel_core.__all__)


@core_modules
def test_a_module_of_the_core_stays_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGEST_MODULE, "one subject a module: split it"


@plugin_modules
def test_a_module_of_a_plugin_stays_short(plugin: str, path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) < LONGEST_MODULE, "one subject a module: split it"


LOAD_CONFIG = """
import parallel_core
config = parallel_core.load_config("parallel.toml")
assert config.parallel_strategy == "fsdp", config
assert config.options.auto_wrap_min_params == 1000, config
"""


@pytest.mark.parametrize(
    "code",
    ["import parallel_core", *(f"import {plugin}" for plugin in PLUGINS), LOAD_CONFIG],
    ids=["parallel_core", *PLUGINS, "load_config"],
)
def test_torch_is_not_imported_by(code: str, tmp_path: Path) -> None:
    """Config checks and listings answer at once, on a login node too: importing torch takes seconds."""
    (tmp_path / "parallel.toml").write_text('parallel_strategy = "fsdp"\nfsdp_auto_wrap_min_params = 1000\n')
    code += "\nimport sys; assert 'torch' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
