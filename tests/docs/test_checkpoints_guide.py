"""The guide to checkpoints: its run goes on as it says, its files are those that are written, its errors are raised."""

from __future__ import annotations

import hashlib
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import parallel_core
from parallel_core import CheckpointError, load_checkpoint, save_checkpoint
from parallel_core.testing import Ranks
from tests.docs.test_code_blocks import run_script

if TYPE_CHECKING:
    from tests.docs.conftest import Document


@pytest.fixture
def guide(document_at: Callable[[str], Document]) -> Document:
    return document_at("docs/guides/checkpoints.md")


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint of the guide's model."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
    load_checkpoint(folder, model)
    return model.state_dict()


def test_the_run_goes_on_under_ddp_and_in_one_process_as_if_it_had_not_stopped(
    guide: Document, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide.write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    script = str(tmp_path / "train.py")
    shown = next(block for block in guide.blocks if block.file_name == "train.py").told
    assert ranks(run_script, script, process_group=False)[0] == shown
    run = tmp_path / "runs" / "mine"
    whole = weights_of(run / "step-000060")
    shutil.copytree(run / "step-000040", tmp_path / "kept")
    for world_size in (2, 1):
        # As if the run had been killed after step 40 or later, while it saved.
        for folder in run.iterdir():
            shutil.rmtree(folder)
        shutil.copytree(tmp_path / "kept", run / "step-000040")
        (run / ".step-000060.saving-0123abcd").mkdir()
        monkeypatch.setenv("PARALLEL_CORE_PARALLEL_STRATEGY", "ddp")
        if world_size == 1:
            printed = run_script(script)
        else:
            printed = ranks(run_script, script, world_size=world_size, process_group=False)[0]
        assert printed == f"{world_size} ranks, from step 40, newest is step-000060\n"
        assert sorted(folder.name for folder in run.iterdir()) == ["step-000040", "step-000060"]
        for name, weight in weights_of(run / "step-000060").items():
            torch.testing.assert_close(weight, whole[name], atol=1e-5, rtol=0)


def test_the_files_in_the_table_are_those_that_are_written(guide: Document, ranks: Ranks, tmp_path: Path) -> None:
    class Average:
        """An object with a tensor in its state."""

        def state_dict(self) -> dict[str, Any]:
            return {"value": torch.ones(3)}

    def work() -> None:
        model, optimizer = trained()
        more: dict[str, Any] = {"objects": {"average": Average()}, "random_state": True}
        save_checkpoint(tmp_path / "sharded", model, optimizer, **more)
        save_checkpoint(tmp_path / "full", model, optimizer, state_dict_type="full", **more)
        save_checkpoint(tmp_path / "parts", model, optimizer, state_dict_type="full", max_file_bytes=70)

    ranks(work)
    written = {re.sub(r"\d+", "N", path.name) for path in tmp_path.rglob("*") if path.is_file()}
    documented = {re.sub(r"\d+", "N", row["file"].strip("`")) for row in guide.rows if "file" in row}
    assert documented == written - {"optimizer-N-of-N.safetensors"}  # "the others likewise"


def test_tied_weights_are_read_by_the_function_of_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_model

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
            self.head.weight = self.embedding.weight

    model, other = Tied(), Tied()
    save_checkpoint(tmp_path / "tied", model, state_dict_type="full")
    file = tmp_path / "tied" / "model.safetensors"
    assert list(load_file(file)) == ["embedding.weight"]
    load_model(other, file)
    assert torch.equal(other.head.weight, model.embedding.weight)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def trained(model: nn.Module | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model or small()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


class PerRow(torch.optim.Optimizer):
    """An optimizer with a number for each row."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # takes no closure
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = torch.ones(3)


class Counted(nn.Linear):
    """A module that does not take its extra state."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def get_extra_state(self) -> Any:
        return 1

    def set_extra_state(self, state: Any) -> None:
        raise ValueError(state)


@contextmanager
def told(messages: list[str]) -> Iterator[None]:
    """Keep the message of the error that the block must raise."""
    with pytest.raises(CheckpointError) as caught:
        yield
    messages.append(str(caught.value))


def errors_of_one_process() -> Iterator[str]:
    """Provoke what can go wrong, in the current folder, and yield the messages."""
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    messages: list[str] = []

    def copy(name: str, file: str = "manifest.json", change: Callable[[bytearray], Any] | None = None) -> Path:
        target = Path("runs", name)
        shutil.copytree("runs/good", target)
        if change is not None:
            content = bytearray((target / file).read_bytes())
            change(content)
            (target / file).write_bytes(content)
        return target

    def flip(content: bytearray) -> None:
        content[-20] ^= 1

    def cut(content: bytearray) -> None:
        del content[-4:]

    weights = "model-rank-00000-of-00001.safetensors"
    save_checkpoint("runs/good", model, optimizer, objects={"scheduler": scheduler})
    save_checkpoint("runs/weights", model)
    Path("runs/file").touch()
    Path("runs/other").mkdir()
    Path("runs/other/notes.txt").touch()
    (copy("gone") / weights).unlink()
    for damaged in (
        copy("manifest", change=flip),
        copy("byte", weights, flip),
        copy("short", weights, cut),
        Path("runs/gone"),
        Path("runs/nowhere"),
        Path("runs"),
    ):
        with told(messages):
            load_checkpoint(damaged, model, optimizer)
    with told(messages):
        load_checkpoint("runs/good", nn.Linear(3, 3))
    with told(messages):
        load_checkpoint("runs/good", small().half())
    with told(messages):
        load_checkpoint("runs/good", model, torch.optim.SGD(model.parameters(), lr=1.0))
    with told(messages):
        load_checkpoint("runs/weights", model, optimizer)
    text = (Path("runs/good/manifest.json").read_bytes())[77:].replace(b'"world_size":1', b'"world_size":0')
    digest = hashlib.sha256(b'{"sha256":"' + b"0" * 64 + b'",' + text).hexdigest().encode()
    copy("odd")
    Path("runs/odd/manifest.json").write_bytes(b'{"sha256":"' + digest + b'",' + text)
    with told(messages):
        load_checkpoint("runs/odd", model)
    with told(messages):
        load_checkpoint("runs/weights", small().to("meta"))
    huge, counted = small(), Counted()
    nn.init.constant_(huge.get_parameter("0.weight"), 1e6)
    save_checkpoint("runs/huge", huge)
    save_checkpoint("runs/counted", counted)
    with told(messages):
        load_checkpoint("runs/huge", small().half(), cast=True)
    with told(messages):
        load_checkpoint("runs/counted", counted)
    hook = optimizer.register_load_state_dict_pre_hook(lambda *_: list[None]().pop())
    with told(messages):
        load_checkpoint("runs/good", model, optimizer)
    hook.remove()
    with told(messages):
        load_checkpoint("runs/good", model, objects={"scaler": scheduler})
    with told(messages):
        load_checkpoint("runs/good", model, objects={"scheduler": nn.Linear(2, 2)})
    with told(messages):
        load_checkpoint("runs/good", model, random_state=True)
    with told(messages):
        save_checkpoint("runs/new", model, extra={"loss": torch.ones(())})
    with told(messages):
        save_checkpoint("runs/other", model)
    with told(messages):
        save_checkpoint("runs/file/new", model)
    Path("runs/weights/notes.txt").touch()
    with told(messages):
        save_checkpoint("runs/weights", model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    with told(messages):
        save_checkpoint("runs/new", model)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save_checkpoint("runs/file/new", model, background=True)
    with told(messages):
        save_checkpoint("runs/new", model)
    yield from messages


def errors_of_two_ranks() -> list[str]:
    """Provoke what can go wrong between ranks, in the current folder, and return the messages."""
    rank = parallel_core.ranks.rank()
    messages: list[str] = []
    model = small()
    with told(messages):
        save_checkpoint("runs/new", model, extra={"rank": rank})
    with told(messages):
        save_checkpoint(f"runs/new-{rank}", model)
    with told(messages):
        load_checkpoint("runs/random", model, random_state=True)
    with told(messages):
        load_checkpoint("runs/random", model, verify=rank == 0)
    config = parallel_core.DistributedConfig(
        parallel_strategy="fsdp", fsdp_mixed_precision="fp32", fsdp_auto_wrap_min_params=10
    )
    wrapped = parallel_core.wrap_model_for_training(small(), config)
    assert wrapped is not None
    optimizer = PerRow(wrapped.parameters())
    optimizer.step()
    with told(messages):
        save_checkpoint("runs/new", wrapped, optimizer)
    is_dir = Path.is_dir
    if rank == 1:  # which sees another disk

        def not_there(path: Path, **more: Any) -> bool:
            return ".saving-" not in str(path) and is_dir(path, **more)

        setattr(Path, "is_dir", not_there)  # noqa: B010  # an assignment would need the method's own type
    try:
        with told(messages):
            save_checkpoint("runs/new", model)
    finally:
        setattr(Path, "is_dir", is_dir)  # noqa: B010  # as above
    assert not Path("runs/new").exists()
    return messages


def test_every_error_in_the_table_is_raised_with_that_message(
    guide: Document, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint("runs/random", small(), random_state=True)
    messages = [*errors_of_one_process(), *ranks(errors_of_two_ranks)[0]]
    shown = [row["message"].strip("`") for row in guide.rows if "message" in row]
    assert shown
    for message in shown:
        pattern = ".*".join(map(re.escape, re.split(r"\s*…\s*", message)))
        found = [each for each in messages if re.search(pattern, each, re.DOTALL)]
        assert found, f"no error says {message!r}; there were: {messages}"
