"""What lies where checkpoints are saved, and is none, or not only one, is neither replaced nor removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch import nn

import parallel_core
from parallel_core import CheckpointError
from parallel_core.checkpoint import folder


def save(place: Path, step: int = 0, keep_last: int | None = None) -> None:
    parallel_core.save_checkpoint(place, nn.Linear(2, 2), extra=step, keep_last=keep_last)


def names(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def refusal(place: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        save(place)
    return str(caught.value).replace(str(place), place.name)


def test_links_are_neither_counted_nor_touched_when_older_ones_are_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", step)
    (tmp_path / "zlatest").symlink_to("step-3")
    (tmp_path / "best").symlink_to(tmp_path / "step-1")
    assert parallel_core.latest_checkpoint(tmp_path) == tmp_path / "step-3"
    save(tmp_path / "step-4", keep_last=2)
    assert names(tmp_path) == ["best", "step-3", "step-4", "zlatest"]
    assert (tmp_path / "zlatest").resolve() == tmp_path / "step-3"


def test_a_checkpoint_that_lies_elsewhere_is_found_by_its_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    save(tmp_path / "run" / "step-1")
    save(tmp_path / "large disk" / "step-2")
    (tmp_path / "run" / "step-2").symlink_to(tmp_path / "large disk" / "step-2")
    assert parallel_core.latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "step-2"


def test_a_manifest_of_another_program_makes_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "manifest.json").write_text('{"name":"PWA"}')
    (tmp_path / "web" / "precious").touch()
    assert refusal(tmp_path / "web") == (
        "web is there and is no checkpoint: its manifest.json is that of another program; move it away, or choose "
        "another name"
    )
    assert names(tmp_path / "web") == ["manifest.json", "precious"]


def test_a_checkpoint_with_something_else_in_it_is_not_replaced(tmp_path: Path) -> None:
    place = tmp_path / "step-1"
    save(place)
    save(place / "nested")
    expected = "step-1 is a checkpoint with something else in it: {}; move that away, or choose another name"
    assert refusal(place) == expected.format("'nested'")
    for name in ("a", "b", "model.safetensors"):  # the last one could be of a save, and is not of this one
        (place / name).touch()
    assert refusal(place) == expected.format("'a', 'b', 'model.safetensors' and 1 more")
    assert parallel_core.latest_checkpoint(place) == place / "nested"


def test_one_with_a_damaged_manifest_is_replaced_unless_there_is_something_else_in_it(tmp_path: Path) -> None:
    place = tmp_path / "step-1"
    parallel_core.save_checkpoint(
        place, nn.Linear(2, 2), state_dict_type="full", max_file_bytes=16, random_state=True
    )  # a file of each kind
    manifest = place / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    (place / "notes.txt").touch()
    assert "something else in it: 'notes.txt'; move" in refusal(place)
    (place / "notes.txt").unlink()
    save(place)
    assert names(place) == ["manifest.json", "model-rank-00000-of-00001.safetensors"]


def test_a_checkpoint_with_something_else_in_it_is_not_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path / f"step-{step}", step)
    (tmp_path / "step-1" / "notes.txt").touch()
    save(tmp_path / "step-4", keep_last=2)
    assert names(tmp_path) == ["step-1", "step-3", "step-4"]


def test_what_can_t_be_pruned_is_logged_and_the_save_has_succeeded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(tmp_path / f"step-{step}", step)
    rename = Path.rename

    def refusing(path: Path, target: Path) -> Path:
        if path.name == "step-1":
            raise PermissionError(13, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refusing)
    save(tmp_path / "step-3", keep_last=1)
    assert names(tmp_path) == ["step-1", "step-3"]
    assert [record.getMessage() for record in caplog.records] == [
        f"the checkpoint {tmp_path / 'step-1'} has had its time, and can't be removed: Permission denied"
    ]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_names_that_are_nearly_those_of_leftovers_are_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    if not can_exchange:
        monkeypatch.setattr(folder, "exchange", lambda one, other: False)
    mine = [
        ".notes.saving-mine", ".notes.saving-0123abcd.d", ".foo.replaced-old", ".bar.replaced-old",
        ".foo.replaced-0123abcd", "..replaced-0123abcd", "...replaced-0123abcd", "..saving-0123abcd", "foo",
    ]  # fmt: skip
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").touch()
    (tmp_path / ".link.saving-0123abcd").symlink_to("foo")
    (tmp_path / ".file.saving-0123abcd").touch()
    before = names(tmp_path)
    for _ in range(2):
        save(tmp_path / "step-1", keep_last=1)
    assert parallel_core.latest_checkpoint(tmp_path) == tmp_path / "step-1"
    assert names(tmp_path) == sorted([*before, "step-1"])
    assert all(names(tmp_path / name) == ["data"] for name in mine)


def test_the_longest_name_can_be_saved_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "exchange", lambda one, other: False)
    name = "ü" * 118
    for _ in range(2):
        save(tmp_path / name)
    assert names(tmp_path) == [name]
    assert refusal(tmp_path / f"{name}a").endswith(
        "has 237 bytes, and at most 236 are possible: while a checkpoint is built it has a longer one; choose a "
        "shorter name"
    )


@pytest.mark.parametrize("path", [None, b"a", "a\0b", "", 3])
def test_what_is_no_name_of_a_folder_is_told(path: str) -> None:
    message = "{}: expected the name of a folder, found {!r}".format
    with pytest.raises(CheckpointError) as caught:
        parallel_core.save_checkpoint(path, nn.Linear(2, 2))
    assert str(caught.value) == message("path", path)
    with pytest.raises(CheckpointError) as caught:
        parallel_core.latest_checkpoint(path)
    assert str(caught.value) == message("folder", path)


def test_a_folder_that_can_t_be_looked_into_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x can't be read: File name too long$"):
        parallel_core.latest_checkpoint(tmp_path / ("x" * 300))
    assert "can't be written: File name too long" in refusal(tmp_path / ("x" * 300) / "step-1")
    with pytest.raises(CheckpointError, match=r"/x+ can't be read: File name too long$"):
        parallel_core.load_checkpoint(tmp_path / ("x" * 300), nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["notes", "notes/runs"])
def test_a_file_is_no_folder_without_checkpoints(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes").touch()
    with pytest.raises(CheckpointError) as caught:
        parallel_core.latest_checkpoint(tmp_path / name)
    assert str(caught.value) == f"{tmp_path / name} can't be read: Not a directory"


def test_a_folder_that_may_not_be_read_is_no_folder_without_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(CheckpointError, match=r"can't be read: Permission denied$"):
        parallel_core.latest_checkpoint(tmp_path)
