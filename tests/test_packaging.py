"""The distributions, built and installed as a user would, in environments that can't see the source tree."""

from __future__ import annotations

import configparser
import email
import importlib.metadata
import re
import shutil
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.commands import SUITE_LIMIT, python, run

ROOT = Path(__file__).parents[1]
SOURCES = {
    "parallel_core": ROOT,
    "parallel_core_ddp": ROOT / "plugins" / "ddp",
    "parallel_core_fsdp": ROOT / "plugins" / "fsdp",
    "parallel_core_fsdp2": ROOT / "plugins" / "fsdp2",
}
every_distribution = pytest.mark.parametrize("package", SOURCES)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of each distribution, and the wheel made from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    for source in SOURCES.values():
        # Without isolation the pinned hatchling does it, and nothing is downloaded; it is there, and is not looked for.
        python("-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", folder, source, cwd=folder)
    return folder


def third_party() -> Iterator[Path]:
    """Yield all that lies in this interpreter's site-packages and neither is ours nor leads to our sources."""
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for item in Path(folder).iterdir():
            ours = "parallel_core" in item.name.lower().replace("-", "_")
            # A .pth file is how an editable install puts a source tree on the path.
            if not ours and not (item.suffix == ".pth" and str(ROOT) in item.read_text(encoding="utf-8")):
                yield item


@pytest.fixture(scope="session")
def install(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that installs a requirement from the built wheels in a new environment and returns its folder."""

    def install_from_wheels(requirement: str) -> Path:
        folder = tmp_path_factory.mktemp("environment")
        venv.create(folder, symlinks=True)
        interpreter = folder / "bin" / "python"
        site_packages = run(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
        # Links, as a copy of torch would take half a minute. pip finds every dependency met but our own.
        for item in third_party():
            (Path(site_packages.strip()) / item.name).symlink_to(item)
        python(
            *("-m", "pip", "--python", interpreter, "install"),
            *("--no-index", "--find-links", built, "--no-compile", requirement),
            cwd=folder,
        )
        return folder

    return install_from_wheels


def names_in_wheel(built: Path, package: str) -> list[str]:
    (wheel,) = built.glob(f"{package}-*.whl")
    return zipfile.ZipFile(wheel).namelist()


def read_from_wheel(built: Path, package: str, name: str) -> str:
    (wheel,) = built.glob(f"{package}-*.whl")
    (found,) = (path for path in names_in_wheel(built, package) if path.endswith(f".dist-info/{name}"))
    return zipfile.ZipFile(wheel).read(found).decode()


@every_distribution
def test_a_wheel_holds_its_package_whole_and_nothing_else(built: Path, package: str) -> None:
    names = names_in_wheel(built, package)
    metadata = f"{package}-{importlib.metadata.version(package)}.dist-info"
    assert {name.partition("/")[0] for name in names} == {package, metadata}
    folder = SOURCES[package] / package
    sources = {path.relative_to(SOURCES[package]).as_posix() for path in folder.rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources
    assert f"{package}/py.typed" in names
    assert f"{metadata}/licenses/LICENSE" in names


@every_distribution
def test_an_sdist_holds_what_a_wheel_is_made_of(built: Path, package: str) -> None:
    """The wheels above are made from the sdists; this says that no more of the repository is in them."""
    (sdist,) = built.glob(f"{package}-*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/")[1] for name in archive.getnames()}
    expected = {package, "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    # hatchling adds the .gitignore that it has read, so that a build from the sdist leaves out the same files.
    assert names - {".gitignore"} == expected | ({"CHANGELOG.md"} if package == "parallel_core" else {"tests"})


@every_distribution
def test_every_distribution_carries_the_license(package: str) -> None:
    assert (SOURCES[package] / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp2"])
def test_a_plugin_registers_its_strategy(built: Path, name: str) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(read_from_wheel(built, f"parallel_core_{name}", "entry_points.txt"))
    assert {section: dict(entry_points[section]) for section in entry_points.sections()} == {
        "parallel_core.strategies": {name: f"parallel_core_{name}"}
    }


def test_the_core_registers_its_command_and_its_pytest_plugin_and_no_strategy(built: Path) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(read_from_wheel(built, "parallel_core", "entry_points.txt"))
    assert {section: dict(entry_points[section]) for section in entry_points.sections()} == {
        "console_scripts": {"parallel-core": "parallel_core.cli:main"},
        "pytest11": {"parallel_core": "parallel_core.testing.pytest_plugin"},
    }


def test_a_plugin_asks_for_the_core_of_its_own_minor_version(built: Path) -> None:
    major, minor, _ = importlib.metadata.version("parallel_core").split(".")
    for package in list(SOURCES)[1:]:
        metadata = email.message_from_string(read_from_wheel(built, package, "METADATA"))
        requirements = map(Requirement, metadata.get_all("Requires-Dist", []))
        (core,) = (requirement for requirement in requirements if requirement.name == "parallel-core")
        assert core.specifier == Requirement(f"parallel-core>={major}.{minor},<{major}.{int(minor) + 1}").specifier
        assert metadata["Version"].startswith(f"{major}.{minor}.")


REPORT = """
import parallel_core, sys
from importlib.metadata import entry_points
print(parallel_core.__file__.startswith(sys.prefix))
for entry_point in sorted(entry_points(group="parallel_core.strategies")):
    print(entry_point.name, entry_point.load().__name__, entry_point.load().__file__.startswith(sys.prefix))
print([strategy.name for strategy in parallel_core.available_strategies()])
"""


def assert_found(environment: Path, strategies: list[str], cwd: Path) -> None:
    """Fail unless the environment has these strategies and no others, and all our code comes from the environment."""
    lines = run(environment / "bin" / "python", "-c", REPORT, cwd=cwd).splitlines()
    assert lines == ["True", *(f"{name} parallel_core_{name} True" for name in strategies), str(strategies)]


@pytest.mark.parametrize(
    ("requirement", "strategies"),
    [("parallel-core", []), ("parallel-core[all]", ["ddp", "fsdp", "fsdp2"])],
    ids=["core", "all"],
)
def test_what_is_installed_from_wheels_is_found(
    install: Callable[[str], Path], tmp_path: Path, requirement: str, strategies: list[str]
) -> None:
    environment = install(requirement)
    assert_found(environment, strategies, cwd=tmp_path)
    assert "usage" in run(environment / "bin" / "parallel-core", "--help", cwd=tmp_path).lower()


@pytest.mark.parametrize("which", ["not deep", pytest.param("deep", marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp2"])
def test_the_tests_of_a_plugin_pass_with_only_it_and_the_core_installed(
    install: Callable[[str], Path],
    tmp_path: Path,
    name: str,
    which: str,
    pytestconfig: pytest.Config,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment = install(f"parallel-core[{name}]")
    assert_found(environment, [name], cwd=tmp_path)
    shutil.copytree(ROOT / "plugins" / name / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    # For pytest's options and for time; nothing in them leads to the source tree.
    for file in (ROOT / "pyproject.toml", Path(__file__).with_name("early.py")):
        shutil.copy(file, tmp_path)
    options: list[str] = []
    # One hash seed for all ranks lets one process import torch for them; the deep run has a seed for each.
    variables = {"PYTHONHASHSEED": "1"} if which == "not deep" else {}
    if pytestconfig.getoption("cov_source", None):
        # This is the only run of these tests: what they cover is left where the outer run gathers its data.
        options = ["--cov", "--cov-report="]
        variables["COVERAGE_FILE"] = str(pytestconfig.rootpath / f".coverage.{name}-{which.replace(' ', '-')}")
    report = run(
        environment / "bin" / "python",
        "-m",
        "pytest",
        *("-c", "pyproject.toml", "-p", "early", "-m", which),
        *options,
        "tests",
        cwd=tmp_path,
        limit=SUITE_LIMIT,
        **variables,
    )
    assert re.search(r"^=+ \d+ passed", report, re.MULTILINE), report
    with capsys.disabled():  # how many tests these were, and which were skipped and why
        print(f"\n{report}")


def test_every_package_that_an_install_brings_is_pinned() -> None:
    """Walk the requirements of `.[dev]` as installed here, down to the last, and look each up in constraints.txt."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    constraints = map(Requirement, re.findall(r"^\w.*", text, re.MULTILINE))
    pins = {canonicalize_name(constraint.name): constraint for constraint in constraints}
    seen: set[tuple[str, str]] = set()
    todo = [("parallel-core", "dev")]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for requirement in map(Requirement, importlib.metadata.requires(name) or []):
            if str(requirement.specifier).startswith("=="):
                continue  # torch pins its CUDA libraries itself
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(canonicalize_name(requirement.name), each) for each in ("", *requirement.extras)]
    missing = {name for name, _ in seen} - pins.keys() - {canonicalize_name(package) for package in SOURCES}
    assert not missing, f"not in constraints.txt: {sorted(missing)}; add each with the version that you have tried"
    loose = [str(pin) for pin in pins.values() if not re.fullmatch(r"==[\w.+]+", str(pin.specifier))]
    assert not loose, f"constraints.txt pins to one version, found {loose}"
