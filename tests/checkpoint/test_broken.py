"""A checkpoint that is not as it was saved is refused, with the name of the file, and nothing changes."""

from __future__ import annotations

import io
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import parallel_core
from parallel_core import CheckpointError
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.runs import KINDS, Run, copied, differences


@pytest.fixture(params=KINDS)
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Run]:
    """A checkpoint of a bare model in training, with everything in it, and the run that it is of."""
    run = Run("language_model", None)
    run.train(range(2))
    place = tmp_path / "step-2"
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1)  # type: ignore[arg-type]  # it has one
    parallel_core.save_checkpoint(
        place,
        run.model,
        run.optimizer,
        state_dict_type=request.param,
        extra={"step": 2},
        objects={"scheduler": scheduler},
        random_state=True,
    )
    return place, run


def state(run: Run) -> dict[str, Any]:
    assert run.optimizer is not None
    return {"weights": run.local(), "optimizer": copied_state(run.optimizer)}


def copied_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {str(index): copied(entries) for index, entries in enumerate(optimizer.state.values())}


def damaged(place: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield the files of a checkpoint with a content that is not what was saved, and put it back afterwards."""
    draw = random.Random(0)
    files = sorted(place.iterdir())
    contents = {file: file.read_bytes() for file in files}
    flips = [(file, draw.randrange(len(contents[file])), 1 << draw.randrange(8)) for file in draw.choices(files, k=200)]
    cuts = [(file, length) for file in files for length in (0, 1, len(contents[file]) // 2, len(contents[file]) - 1)]
    for file, position, bit in flips:
        changed = bytearray(contents[file])
        changed[position] ^= bit
        yield file, bytes(changed)
        file.write_bytes(contents[file])
    for file, length in cuts:
        yield file, contents[file][:length]
        file.write_bytes(contents[file])


def test_every_changed_byte_and_every_cut_is_refused(saved: tuple[Path, Run]) -> None:
    place, _ = saved
    run = Run("language_model", None, seed=4)
    run.train(range(1))
    before = state(run)
    for file, content in damaged(place):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=str(file)):
            parallel_core.load_checkpoint(place, run.model, run.optimizer, random_state=True)
    assert differences(state(run), before) == []
    parallel_core.load_checkpoint(place, run.model, run.optimizer, random_state=True)
    assert differences(state(run), state(saved[1])) == []


def _with_another_shape(content: bytes) -> bytes:
    """Return a file of the same length, with the shape of a tensor laid out in another way."""
    found = next(each for each in re.finditer(rb'"shape":\[(\d+),(\d+)\]', content) if each[1] != each[2])
    return content.replace(found.group(), b'"shape":[%b,%b]' % (found[2], found[1]), 1)


def test_without_hashes_what_the_headers_tell_is_still_checked(saved: tuple[Path, Run]) -> None:
    """`verify=False` looks at sizes and headers: a tensor is never read from where it does not lie."""
    place, run = saved
    cut = [(file, content) for file, content in damaged(place) if len(content) != file.stat().st_size]
    assert len(cut) >= 16
    headers = [(file, _with_another_shape(file.read_bytes())) for file in place.glob("*.safetensors")]
    for file, content in cut + headers:
        whole = file.read_bytes()
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=str(file)):
            parallel_core.load_checkpoint(place, run.model, run.optimizer, verify=False, random_state=True)
        file.write_bytes(whole)
    parallel_core.load_checkpoint(place, run.model, run.optimizer, verify=False, random_state=True)


def test_a_missing_file_is_named(saved: tuple[Path, Run]) -> None:
    place, run = saved
    for file in sorted(place.iterdir()):
        moved = file.rename(place.with_name("moved"))
        match = f"{place} is no complete checkpoint: it lacks {file.name}" if file.suffix == ".json" else str(file)
        match = str(file) if file.name == "random-states.json" else match
        with pytest.raises(CheckpointError, match=match):
            parallel_core.load_checkpoint(place, run.model, run.optimizer)
        moved.rename(file)


def test_a_pickle_in_any_file_that_torch_would_read_runs_nothing(saved: tuple[Path, Run], tmp_path: Path) -> None:
    place, run = saved

    class Bomb:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "exploded",)

    names = [file.name for file in place.iterdir()]
    for name in [".metadata", "__0_0.distcp", "pytorch_model.bin", "model.pt", "optimizer.pt", "scheduler.pt", *names]:
        spoilt = tmp_path / "spoilt"
        shutil.copytree(place, spoilt)
        torch.save(Bomb(), pickled := io.BytesIO())
        (spoilt / name).write_bytes(pickled.getvalue())
        if name in names:
            with pytest.raises(CheckpointError, match=name):
                parallel_core.load_checkpoint(spoilt, run.model, run.optimizer, random_state=True)
        else:
            parallel_core.load_checkpoint(spoilt, run.model, run.optimizer, random_state=True)
        shutil.rmtree(spoilt)
    assert not (tmp_path / "exploded").exists()


def test_every_rank_raises_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """Each file is looked at by one rank; what it finds is raised on all."""

    def work() -> list[str]:
        run = Run("blocks", None)
        place = tmp_path / "step-1"
        parallel_core.save_checkpoint(place, run.model, run.optimizer)
        found = []
        for file in sorted(place.iterdir()):
            content = file.read_bytes()
            parallel_core.ranks.all_gather(None)
            if parallel_core.ranks.rank() == 0:
                file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            parallel_core.ranks.all_gather(None)
            with pytest.raises(CheckpointError) as caught:
                parallel_core.load_checkpoint(place, run.model, run.optimizer)
            found.append(str(caught.value).replace(str(tmp_path), ""))
            parallel_core.ranks.all_gather(None)
            if parallel_core.ranks.rank() == 0:
                file.write_bytes(content)
            parallel_core.ranks.all_gather(None)
        return found

    first, second = ranks(work)
    assert first == second
    assert first == [
        "/step-1/manifest.json is damaged: it is not as it was written; use another checkpoint",
        "rank 0 of 2: /step-1/model-rank-00000-of-00002.safetensors is damaged: its content is not what was saved",
        "rank 1 of 2: /step-1/model-rank-00001-of-00002.safetensors is damaged: its content is not what was saved",
    ]
