"""What no save writes is refused by name, whatever its hashes say: nothing hangs, and nothing ends in a traceback."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parallel_core import CheckpointError, latest_checkpoint, load_checkpoint, save_checkpoint
from parallel_core.checkpoint.tree import decode, encode
from parallel_core.cli import main

DEEP = 100_000  # lists in lists


def rewrite(folder: Path, change: Callable[[Any], Any] = lambda manifest: None, raw: bytes | None = None) -> None:
    """Change a manifest, or what follows its hash, and give it the hash of what it is then."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_bytes())
    manifest.pop("sha256")
    change(manifest)
    body = (json.dumps(manifest).encode()[1:] if raw is None else raw) + b"\n"
    head, tail = b'{"sha256":"', b'",'
    digest = hashlib.sha256(head + b"0" * 64 + tail + body).hexdigest().encode()
    file.write_bytes(head + digest + tail + body)


def at(*path: Any, value: Any) -> Callable[[Any], None]:
    """Return what puts a value into a manifest."""

    def change(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = value

    return change


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "good"
    save_checkpoint(place, *made(), objects={"a": nn.Linear(2, 2)}, extra={"step": 1}, random_state=True)
    return place


def copied(good: Path, folder: Path) -> Path:
    (bad := folder / "bad").mkdir()
    for file in good.iterdir():
        (bad / file.name).write_bytes(file.read_bytes())
    return bad


WEIGHT = ("model", "tensors", "weight")
STATE = ("optimizer", "values", "state")
GROUPS = ("optimizer", "values", "param_groups")
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a time that no calendar has": (at("saved_at", value=1e300), "it was saved 1e+300 seconds after 1970"),
    "a time before 1970": (at("saved_at", value=-1), "it was saved -1 seconds after 1970"),
    "no ranks": (at("world_size", value=0), "it was saved by 0 ranks"),
    "another kind": (at("state_dict_type", value="odd"), "its kind is 'odd'"),
    "a tie of nothing": (at("tied", value=[[]]), "the tensor with the names [] has not two names"),
    "a tie with itself": (at("tied", value=[["a", "a"]]), "the tensor with the names ['a', 'a'] has not two names"),
    "a file elsewhere": (at("files", 0, "name", value="../a"), "it names the file '../a'"),
    "a file that no system has": (at("files", 0, "name", value="a\0b"), r"it names the file 'a\x00b'"),
    "a size below nothing": (at("files", 0, "size", value=-1), "has -1 bytes"),
    "a state of nothing": (at("objects", "values", "a", value={"$tensor": "x"}), "there is no tensor 'x'"),
    "a state by no name": (at("model", "values", value={"x": {"$tensor": ["a"]}}), "model: 'x': '$tensor' stands"),
    "a number that is none": (at("extra", value={"$float": 10**400}), "extra: $float with 1000"),
    "a mark that nobody knows": (at("extra", value={"$odd": 1}), "extra: '$odd' stands for nothing"),
    "a group that is no dict": (at(*GROUPS, value=[{"$tuple": []}]), "param_groups: expected dicts"),
    "a group without names": (at(*GROUPS, value=[{"params": 5}]), "param_groups: expected dicts"),
    "no state": (at(*STATE, value=5), "optimizer: no state of an optimizer: Expected `object`, got `int`"),
    "state that refers to nothing": (at(*STATE, value={"a": {"b": {"$tensor": "x"}}}), "optimizer: 'a', 'b': there is"),
    "a row twice": (at(*WEIGHT, "pieces", value=[[0, [0, 0], [2, 2]], [1, [1, 0], [2, 2]]]), "the same elements"),
    "a run twice": (at(*WEIGHT, "pieces", value=[[0, [0], [5]], [1, [4], [3]]]), "have the same elements"),
    "a piece of nothing in the same file": (
        at(*WEIGHT, "pieces", value=[[0, [0, 0], [4, 2]], [0, [0, 0], [0, 2]]]),
        "two pieces of it are in one file",
    ),
    "a file twice": (lambda manifest: manifest["files"].append(manifest["files"][0]), "more than once"),
    "random states in no file": (
        lambda manifest: [manifest["files"].remove(f) for f in [*manifest["files"]] if f["name"].startswith("random")],
        "it has random states, and the file 'random-states.json' is not among its files",
    ),
    "a piece outside": (at(*WEIGHT, "pieces", value=[[0, [1, 0], [4, 2]]]), "can't have the piece"),
    "a piece larger than its file": (
        at(*WEIGHT, value={"dtype": "float32", "shape": [2**40, 4], "pieces": [[0, [0, 0], [2**40, 4]]]}),
        "can't have the piece",
    ),
    "more elements than torch counts": (
        at(*WEIGHT, value={"dtype": "float32", "shape": [2**70, 0], "pieces": []}),
        "which is no tensor that can be saved",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_a_manifest_without_sense_is_refused_by_all(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    bad = copied(good, tmp_path)
    change, reason = CHANGES[case]
    rewrite(bad, change)
    model, optimizer = made()
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(bad, model, optimizer, objects={"a": nn.Linear(2, 2)}, random_state=True)
    expected = f"{bad / 'manifest.json'} is not sensible: "
    assert str(caught.value).startswith(expected)
    assert reason in str(caught.value)
    assert str((model.state_dict(), optimizer.state_dict())) == str(before)
    for action, *more in (
        ("inspect",),
        ("inspect", "--all"),
        ("verify",),
        ("consolidate", tmp_path / "f"),
        ("diff", good),
    ):
        assert main(["checkpoint", action, str(bad), *map(str, more)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {expected}")
    assert latest_checkpoint(tmp_path) is None


def test_state_that_the_optimizer_does_not_take_changes_nothing(good: Path, tmp_path: Path) -> None:
    """What the next step would look for, and not find."""
    rewrite(bad := copied(good, tmp_path), at(*STATE, "weight", value={"exp_avg": 5}))
    model, optimizer = made()
    with torch.no_grad():
        model.get_parameter("weight").fill_(7)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with pytest.raises(CheckpointError, match="state without 'exp_avg_sq', 'step', which AdamW keeps"):
        load_checkpoint(bad, model, optimizer)
    assert str((model.state_dict(), optimizer.state_dict())) == str(before)


@pytest.mark.parametrize("where", ["extra", "odd"])
def test_a_manifest_that_is_nested_too_deep_is_passed_over(good: Path, tmp_path: Path, where: str) -> None:
    bad = copied(good, tmp_path)
    rewrite(
        bad, raw=b'"%s":%s,' % (where.encode(), b"[" * DEEP + b"]" * DEEP) + (bad / "manifest.json").read_bytes()[77:]
    )
    with pytest.raises(
        CheckpointError, match=r"manifest\.json is no manifest of a checkpoint: maximum recursion depth"
    ):
        load_checkpoint(bad, nn.Linear(2, 4))
    save_checkpoint(tmp_path / "whole", nn.Linear(2, 4))
    assert latest_checkpoint(tmp_path) == tmp_path / "whole"


def test_values_that_are_nested_too_deep_are_refused() -> None:
    node: Any = []
    for _ in range(DEEP):
        node = [node]
    with pytest.raises(CheckpointError, match=r"^extra: nested too deep"):
        encode(node, "extra")
    with pytest.raises(CheckpointError, match=r"^nested too deep"):
        decode(node)
    while node:  # from the outside: Python frees them one inside the other
        node = node[0]


def test_weights_whose_header_or_index_is_hostile_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    header = b'{"a":' + b"[" * DEEP + b"]" * DEEP + b"}"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(
        CheckpointError, match=f"{file}: the header is not that of a safetensors file: maximum recursion"
    ):
        load_checkpoint(file, nn.Linear(2, 4))
    for text, reason in (
        ('{"weight_map": {}}', "names no file"),
        ('{"weight_map": {"a": "a\\u0000b"}}', "names the file 'a\\x00b', which is not one of its own folder"),
        ('{"weight_map": {"a": ".."}}', "names the file '..', which is not one of its own folder"),
        ('{"a":' + "[" * DEEP, "can't be read: maximum recursion depth"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(tmp_path, nn.Linear(2, 4))
        assert str(caught.value).startswith(f"{index} {reason}")
        assert main(["checkpoint", "inspect", str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith(f"error: {index} {reason}")


def test_a_pipe_or_a_device_in_the_place_of_a_file_is_not_waited_for(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = copied(good, tmp_path)
    name = "random-states.json"
    rewrite(bad, lambda manifest: [file.update(size=0) for file in manifest["files"] if file["name"] == name])
    for replace in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (bad / name).unlink()
        replace(bad / name)
        for verify in (True, False):
            with pytest.raises(CheckpointError, match=f"{bad / name} can't be read: it is a pipe or a device"):
                load_checkpoint(bad, nn.Linear(2, 4), random_state=True, verify=verify)
        assert main(["checkpoint", "verify", str(bad)]) == 1
        assert f"{name}  it can't be read: it is a pipe or a device" in capsys.readouterr().out
    (bad / "manifest.json").unlink()
    os.mkfifo(bad / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json can't be read: it is a pipe or a device"):
        load_checkpoint(bad, nn.Linear(2, 4))
    assert main(["checkpoint", "verify", str(bad)]) == 2
    assert latest_checkpoint(tmp_path) is None
    os.mkfifo(tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors can't be read: it is a pipe or a device"):
        load_checkpoint(tmp_path, nn.Linear(2, 4))


def test_a_link_to_a_file_is_a_file(good: Path, tmp_path: Path) -> None:
    bad = copied(good, tmp_path)
    (file,) = bad.glob("model-*")
    file.unlink()
    file.symlink_to(good / file.name)
    load_checkpoint(bad, model := nn.Linear(2, 4))
    assert torch.equal(model.weight, made()[0].get_parameter("weight"))


def test_output_that_stdout_has_no_letters_or_no_room_for(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a", nn.Linear(2, 2), extra={"name": "ü"})
    command = [sys.executable, "-m", "parallel_core.cli", "checkpoint", "inspect", str(tmp_path / "a")]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, env=ascii_only, check=True, capture_output=True, text=True)
    assert r"{'name': '\xfc'}" in done.stdout
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (2, "error: the output can't be written: No space left on device\n")


def test_a_reader_that_has_ended_ends_the_command_in_silence(good: Path) -> None:
    command = f"({sys.executable} -m parallel_core.cli checkpoint inspect {good}; echo $? >&2) | (exec <&-; sleep 0)"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.stderr == "141\n"


def test_a_command_without_an_output_runs(good: Path) -> None:
    command = f"{sys.executable} -m parallel_core.cli checkpoint diff {good} {good} >&-"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("action", ["inspect", "verify", "diff"])
def test_what_nobody_has_thought_of_is_no_traceback(
    good: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], action: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("odd")

    for name in ("describe", "verify", "open_saved"):
        monkeypatch.setattr(f"parallel_core.cli.checkpoint.{name}", fail)
    assert main(["checkpoint", action, str(good), *([str(good)] if action == "diff" else [])]) == 2
    assert capsys.readouterr().err.startswith(f"error: {action} failed, and should have said why: KeyError: 'odd'; ")


def test_a_size_of_many_digits_is_one(good: Path, tmp_path: Path) -> None:
    size = "9" * 400 + ".5GB"
    assert main(["checkpoint", "consolidate", str(good), str(tmp_path / "full"), "--max-file-size", size]) == 0
