"""What a whole test run with the fixture does: its processes end with it, and it costs nothing where it is not used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

LIMIT = 60.0  # seconds until an inner test run is taken for stuck


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_pytest(folder: Path, files: dict[str, str], *options: str) -> subprocess.Popen[str]:
    """Start a test run of its own, led by its own process group as in a terminal."""
    for name, text in files.items():
        (folder / name).write_text(textwrap.dedent(text))
    # An outer run's coverage must not reach the inner one, whose own is looked at.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("COV", "PYTEST"))}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--import-mode=importlib", *options],
        cwd=folder,
        env=inherited,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def pids_in(folder: Path, count: int) -> list[int]:
    """Wait until ``count`` processes have each left a file named after their id, and return these."""
    deadline = time.monotonic() + LIMIT
    while len(pids := [int(path.name) for path in folder.iterdir()]) < count:
        assert time.monotonic() < deadline, f"{len(pids)} processes of {count} have started in {LIMIT} s"
        time.sleep(0.05)
    return pids


def ended(pids: list[int], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


# Functions of which ranks run one in a test that is measured, and two in tests that are not.
PAUSES = {
    "paused.py": """
        def before():
            return "unmeasured, before"

        def between():
            return "measured"

        def after():
            return "unmeasured, after"
        """,
    "test_pauses.py": """
        import paused
        import pytest

        @pytest.mark.no_cover
        def test_before(ranks):
            ranks(paused.before, world_size=1)

        def test_between(ranks):
            ranks(paused.between, world_size=1)

        @pytest.mark.no_cover
        def test_after(ranks):
            ranks(paused.after, world_size=1)
        """,
    "pytest.ini": "[pytest]\npythonpath = .\n",
}


@pytest.fixture(scope="module")
def run_with_xdist_and_coverage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run two xdist workers with a rank each, and return the folder; it is looked at from several sides."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "pids").mkdir()
    files = {
        "measured.py": """
            def on_a_rank(xdist_worker):
                if xdist_worker == "gw0":
                    return "first"
                return "second"

            def never():
                return "unreached"
            """,
        "test_inner.py": """
            import os, pathlib
            import measured

            def work():
                pathlib.Path("pids", str(os.getpid())).touch()
                return measured.on_a_rank(os.environ["PYTEST_XDIST_WORKER"])

            def test_inner(ranks):
                assert ranks(work, world_size=1)[0] in ("first", "second")
            """,
        **PAUSES,
    }
    # "each" gives every test to every xdist worker.
    options = ("-n", "2", "--dist", "each", "--cov=measured", "--cov=paused", "--cov-report=annotate:report")
    process = start_pytest(folder, files, *options)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    return folder


def test_each_xdist_worker_has_a_pool_of_its_own(run_with_xdist_and_coverage: Path) -> None:
    assert len(list((run_with_xdist_and_coverage / "pids").iterdir())) == 2


def test_no_worker_outlives_the_run(run_with_xdist_and_coverage: Path) -> None:
    assert not any(is_running(int(path.name)) for path in (run_with_xdist_and_coverage / "pids").iterdir())


def test_what_ranks_execute_is_covered(run_with_xdist_and_coverage: Path) -> None:
    [report] = (run_with_xdist_and_coverage / "report").glob("*measured.py,cover")
    lines = report.read_text().splitlines()
    assert '>         return "first"' in lines
    assert '>     return "second"' in lines
    assert '!     return "unreached"' in lines


def marks_of_pauses(folder: Path) -> list[str]:
    """Return how the report marks what the ranks returned: `>` was run, `!` was not."""
    [report] = (folder / "report").glob("*paused.py,cover")
    return [line[0] for line in report.read_text().splitlines() if "return" in line]


def test_ranks_pause_their_coverage_where_the_test_does(run_with_xdist_and_coverage: Path) -> None:
    assert marks_of_pauses(run_with_xdist_and_coverage) == ["!", ">", "!"]


@pytest.mark.deep
def test_ranks_that_were_started_in_a_pause_measure_after_it(tmp_path: Path) -> None:
    # Without xdist nothing measures in a pause, so that the first call does not start to either.
    process = start_pytest(tmp_path, PAUSES, "--cov=paused", "--cov-report=annotate:report")
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    assert marks_of_pauses(tmp_path) == ["!", ">", "!"]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_a_run_that_is_ended(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "pids").mkdir()
    source = """
        import os, pathlib, subprocess, time

        def work():
            child = subprocess.Popen(["sleep", "600"])
            for pid in (os.getpid(), child.pid):
                pathlib.Path("pids", str(pid)).touch()
            time.sleep(600)

        def test_inner(ranks):
            ranks(work, world_size=1, timeout=600)
        """
    process = start_pytest(tmp_path, {"test_inner.py": source})
    pids = pids_in(tmp_path / "pids", 2)
    assert all(map(is_running, pids))
    # Ctrl-C reaches the terminal's whole process group; SIGKILL here only pytest, which can't tidy up then.
    if how is signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.send_signal(how)
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == (pytest.ExitCode.INTERRUPTED if how is signal.SIGINT else -how), output
    assert ended(pids)


def test_a_run_that_does_not_use_the_fixture_imports_nothing_for_it(tmp_path: Path) -> None:
    source = """
        import sys

        def test_inner():
            assert "parallel_core.testing.pytest_plugin" in sys.modules
            heavy = {"torch", "numpy", "cloudpickle", "msgspec", "multiprocessing", "parallel_core.testing.pool"}
            assert not heavy & set(sys.modules)
        """
    process = start_pytest(tmp_path, {"test_inner.py": source})
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output


def test_a_setting_that_is_none_of_the_two_is_refused(tmp_path: Path) -> None:
    files = {"pytest.ini": "[pytest]\nranks_coverage = one\n", "test_inner.py": "def test_inner(ranks): ...\n"}
    output, _ = start_pytest(tmp_path, files).communicate(timeout=LIMIT)
    assert "ranks_coverage is 'one': it must be 'all' or 'in turns'" in output


def test_without_cloudpickle_the_fixture_says_what_to_install(tmp_path: Path) -> None:
    hide = "import sys\nsys.modules['cloudpickle'] = None\n"
    process = start_pytest(tmp_path, {"conftest.py": hide, "test_inner.py": "def test_inner(ranks): ...\n"})
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    expected = "the fixture 'ranks' needs cloudpickle, which is not installed: pip install 'parallel-core[testing]'"
    assert expected in output
