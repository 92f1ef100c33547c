"""The third-party strategy: small, installed as its own distribution, and used by nothing but its name."""

from __future__ import annotations

import re
from collections.abc import Callable
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
from tests.commands import install, python

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(path for path in (EXAMPLES / "third_party").rglob("*") if path.suffix in (".md", ".py", ".toml"))

MODULE = "parallel_core_localsgd"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the distribution is installed."""
    folder = tmp_path_factory.mktemp("localsgd") / "site"
    install(EXAMPLES / "third_party", folder)
    return folder


@pytest.fixture
def localsgd(site: Path, visible: Callable[[Path, str], None]) -> None:
    visible(site, MODULE)


def test_it_has_less_than_sixty_lines_in_all() -> None:
    lengths = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert lengths.keys() == {"README.md", "pyproject.toml", "parallel_core_localsgd.py", "test_conformance.py"}
    assert sum(lengths.values()) < 60, lengths


def test_it_is_installed_and_listed_under_its_name(site: Path, tmp_path: Path) -> None:
    listed = python("-m", "parallel_core.cli", "strategies", cwd=tmp_path, PYTHONPATH=str(site))
    assert re.search(r"^localsgd +parallel-core-localsgd +0\.1\.0 +ready *$", listed, re.MULTILINE), listed


def test_the_main_job_trains_under_it_by_nothing_but_its_name(
    ranks: Ranks, localsgd: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    settings = ("--width", "16", "--depth", "1", "--heads", "2", "--context", "16", "--batch", "12", "--sample", "20")
    line = [*settings, "--steps", "40", "--learning-rate", "0.03", "--output", str(tmp_path / "run")]

    def work() -> None:
        import train_lm

        train_lm.main(line)

    env = {"PARALLEL_CORE_PARALLEL_STRATEGY": "localsgd"}
    printed = ranks.outcomes(work, process_group=False, env=env)[0].output
    assert re.search(r"[\d,]+ parameters, strategy localsgd", printed), printed
    assert len(re.findall(r"^ +[01] +cpu +[\d,]+ +100\.0%", printed, re.MULTILINE)) == 2, printed
    verdict = re.search(r"^loss [\d.]+ -> [\d.]+ \((\d+)% of its start\)$", printed, re.MULTILINE)
    assert verdict, printed
    assert int(verdict[1]) < 85
    assert list(tmp_path.glob("run/step-000040/*.safetensors"))


def test_ranks_are_alike_after_every_kth_step_and_not_between(ranks: Ranks, localsgd: None) -> None:
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

    assert ranks(work) == [[False, False, True] * 2] * 2


def test_what_the_ranks_agree_on_is_the_mean(ranks: Ranks, localsgd: None) -> None:
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

    (alone,) = ranks(work, world_size=1, process_group=False)
    together = ranks(work, world_size=3)[0]
    for name, weight in alone.items():
        torch.testing.assert_close(together[name], weight, atol=1e-6, rtol=0)
    assert torch.equal(together["2.weight"], alone["2.weight"])  # frozen: not a bit of it changes
