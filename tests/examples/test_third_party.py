"""The third-party strategy: small, installed as its own distribution, and used by nothing but its name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import parallel_core
from parallel_core import (
    data_parallel,
    model_state_dict,
    wrap_model_for_training,
    wrap_optimizer,
)
from parallel_core import ranks as collective
from parallel_core.testing import Ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(path for path in (EXAMPLES / "third_party").rglob("*") if path.suffix in (".md", ".py", ".toml"))

# Seconds; each is several times what the step takes on two slow cores: they end a hang and measure nothing.
PIP_LIMIT = 120
SCRIPT_LIMIT = 180
SUITE_LIMIT = 600

# What would lead the processes started here to this test run, its ranks or a user's own settings.
LEAKING = re.compile(r"PYTEST|PYTHONPATH$|PARALLEL_CORE|(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_\w+)$")


def run(*command: str | Path, site: Path, cwd: Path, limit: float, **environment: str) -> str:
    """Run a Python command with a folder on its path, and return what it printed; fail with it where it fails."""
    kept = {name: value for name, value in os.environ.items() if not LEAKING.match(name)}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=kept | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the distribution is installed."""
    folder = tmp_path_factory.mktemp("localsgd")
    # Without isolation and dependencies: the build backend and the core are here already, nothing is downloaded.
    install = ["install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    source = EXAMPLES / "third_party"
    run("-m", "pip", *install, "--target", folder / "site", source, site=folder, cwd=folder, limit=PIP_LIMIT)
    return folder / "site"


@pytest.fixture(scope="module")
def own_ranks(site: Path) -> Iterator[Ranks]:
    """Ranks that see the distribution; those of the test run have looked already which strategies there are."""
    with pytest.MonkeyPatch.context() as patch, Ranks() as ranks:
        patch.syspath_prepend(str(site))
        yield ranks


def test_it_has_less_than_sixty_lines_in_all() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert lengths.keys() == {"README.md", "pyproject.toml", "parallel_core_localsgd.py", "test_conformance.py"}
    assert sum(lengths.values()) < 60, lengths


def test_it_is_installed_and_listed_under_its_name(site: Path, tmp_path: Path) -> None:
    listed = run("-m", "parallel_core.cli", "strategies", site=site, cwd=tmp_path, limit=PIP_LIMIT)
    assert re.search(r"^localsgd +parallel-core-localsgd +0\.1\.0 +ready *$", listed, re.MULTILINE), listed


def test_its_own_conformance_test_passes(site: Path, tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "third_party" / "tests" / "test_conformance.py", tmp_path)
    options = ("-q", "-W", "error", "-p", "no:cacheprovider")
    report = run("-m", "pytest", *options, tmp_path, site=site, cwd=tmp_path, limit=SUITE_LIMIT)
    assert re.search(r"^clause +localsgd$", report, re.MULTILINE), report
    assert re.search(r"^full state is the bare models +kept$", report, re.MULTILINE), report


def test_the_main_job_trains_under_it_by_nothing_but_its_name(site: Path, tmp_path: Path) -> None:
    settings = ("--width", "16", "--depth", "1", "--heads", "2", "--context", "16", "--batch", "12", "--sample", "20")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(
        *launcher,
        EXAMPLES / "train_lm.py",
        *settings,
        *("--steps", "40", "--learning-rate", "0.03", "--output", tmp_path / "run"),
        site=site,
        cwd=tmp_path,
        limit=SCRIPT_LIMIT,
        PARALLEL_CORE_PARALLEL_STRATEGY="localsgd",
    )
    assert re.search(r"[\d,]+ parameters, strategy localsgd", printed), printed
    assert len(re.findall(r"^ +[01] +cpu +[\d,]+ +100\.0%", printed, re.MULTILINE)) == 2, printed
    verdict = re.search(r"^loss [\d.]+ -> [\d.]+ \((\d+)% of its start\)$", printed, re.MULTILINE)
    assert verdict, printed
    assert int(verdict[1]) < 85
    assert list(tmp_path.glob("run/step-00000040/*.safetensors"))


def test_ranks_are_alike_after_every_kth_step_and_not_between(own_ranks: Ranks) -> None:
    def work() -> list[bool]:
        config = parallel_core.DistributedConfig(parallel_strategy="localsgd", localsgd_every=3)
        model = wrap_model_for_training(nn.Linear(4, 4), config)
        assert model is not None
        optimizer = wrap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        alike = []
        for _ in range(6):
            model(torch.full((2, 4), 1.0 + collective.rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            held = {name: tensor.detach() for name, tensor in model.named_parameters()}
            state = {str(key): value["momentum_buffer"] for key, value in enumerate(optimizer.state.values())}
            alike.append(not collective.differing_tensors({**held, **state}))
        return alike

    assert own_ranks(work) == [[False, False, True] * 2] * 2


def test_what_the_ranks_agree_on_is_the_mean(own_ranks: Ranks) -> None:
    # For plain gradient descent the mean of one step's weights is the step of the mean gradient: one process's.
    def work() -> dict[str, torch.Tensor]:
        torch.manual_seed(collective.rank())  # the wrap makes all ranks start alike
        config = parallel_core.DistributedConfig(parallel_strategy="localsgd", localsgd_every=1)
        model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4).requires_grad_(False))
        model = wrap_model_for_training(model, config) or model
        optimizer = wrap_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        index, count = data_parallel(model)
        for seed in range(5):
            batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(seed))
            model(batch[index::count]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model_state_dict(model)

    (alone,) = own_ranks(work, world_size=1, process_group=False)
    together = own_ranks(work, world_size=3)[0]
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, atol=1e-6, rtol=0)
    assert torch.equal(together["2.weight"], alone["2.weight"])  # frozen: not a bit of it changes
