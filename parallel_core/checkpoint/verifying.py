"""Which files of a checkpoint are not what was saved: all of them at once, and without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from parallel_core.checkpoint.folder import path_of, standing
from parallel_core.checkpoint.manifest import MANIFEST, Manifest, SavedFile, Section, is_intact
from parallel_core.checkpoint.opening import INDEX, Saved, hash_of, header_of, open_saved, read_index, weight_files
from parallel_core.checkpoint.safetensors_format import TensorInfo, stored
from parallel_core.checkpoint.untrusted import read_file, size_of, told_of_reading
from parallel_core.errors import CheckpointError

Told = Callable[[int, int], None]
"""Called with the bytes that are done and those that there are in all, as they grow."""


@dataclass
class Verdict:
    """What was found wrong.

    Attributes:
        bad: why a file is not what was saved, by its name.
        good: the files with which nothing is wrong.
        unhashed: those of the good ones that were saved without a hash, so that a changed byte is not noticed.
    """

    bad: dict[str, str] = field(default_factory=dict)
    good: list[str] = field(default_factory=list)
    unhashed: list[str] = field(default_factory=list)


def nobody(_done: int, _total: int) -> None:
    """Tell nobody."""


def verify(path: str | os.PathLike[str], told: Told = nobody) -> Verdict:
    """Compare every file with what was saved: of a checkpoint, or of weights from elsewhere, which have no hashes.

    Args:
        path: a checkpoint's folder, a `.safetensors` file, or a folder of them.
        told: is called as files are read.

    Raises:
        CheckpointError: there is no such thing, or it can't be told what belongs to it.
    """
    place = path_of(path, "path")
    with told_of_reading(place):
        folder = standing(place)
        if folder.is_file() and folder.suffix != ".safetensors":
            raise CheckpointError(f"{path} is a file, expected a checkpoint's folder or a .safetensors file")
        if folder.exists() and not (folder / MANIFEST).exists():
            return _verify_weights(folder)
        if (folder / MANIFEST).is_file() and not is_intact(read_file(folder / MANIFEST)):
            reason = "it is not as it was written, so there is nothing to compare the other files with"
            return Verdict({MANIFEST: reason})
    verdict = verify_files(open_saved(path), told)
    verdict.good.append(MANIFEST)
    return verdict


def verify_files(saved: Saved, told: Told = nobody) -> Verdict:
    """Compare the files of a checkpoint with its manifest."""
    verdict = Verdict()
    done, total = 0, saved.manifest.nbytes
    expected = _expected(saved.manifest)
    for index, file in enumerate(saved.manifest.files):
        before = done

        def more(count: int) -> None:
            nonlocal done
            done += count
            told(done, total)

        problem = _problem(saved.folder / file.name, file, expected[index], more)
        if problem is not None:
            verdict.bad[file.name] = problem
        else:
            verdict.good.append(file.name)
            verdict.unhashed += [file.name] if file.sha256 is None else []
        more(before + file.size - done)  # what was not read counts as done too
    return verdict


def _problem(
    path: Path, file: SavedFile, expected: Mapping[str, TensorInfo], told: Callable[[int], None]
) -> str | None:
    """Return what is wrong with a file, or None."""
    try:
        if (size := size_of(path)) != file.size:
            return f"it has {size} bytes, and was saved with {file.size}"
        if file.sha256 is not None and hash_of(path, told) != file.sha256:
            return "its content is not what was saved"
        if path.suffix == ".safetensors":
            return next(_differing(path, expected), None)
    except CheckpointError as error:
        return str(error).replace(f"{path} can't", "it can't")
    return None


def _differing(path: Path, expected: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield where the header of a file says something else than the manifest."""
    entries = header_of(path).entries
    for name, info in expected.items():
        found = (entries[name].dtype, entries[name].shape) if name in entries else None
        code, shape = stored(info)
        if found != (code, shape):
            there = "lacks it" if found is None else f"has {found[0]}{list(found[1])}"
            yield f"the manifest has {code}{list(shape)} in it for {name!r}, and it {there}"
    for name in entries.keys() - expected.keys():
        yield f"it has {name!r}, of which the manifest knows nothing"


def _expected(manifest: Manifest) -> list[dict[str, TensorInfo]]:
    """Return what each file has, by the manifest."""
    found: list[dict[str, TensorInfo]] = [{} for _ in manifest.files]
    for section in (manifest.model, manifest.optimizer or Section(), manifest.objects):
        for name, tensor in section.tensors.items():
            for piece in tensor.pieces:
                found[piece.file][name] = TensorInfo(tensor.dtype, piece.sizes)
    return found


def _verify_weights(place: Path) -> Verdict:
    """Look whether files of weights are whole, and have what the index says, if there is one."""
    verdict = Verdict()
    index: dict[str, str] = {}
    if place.is_dir():
        try:
            index = read_index(place) or {}
        except CheckpointError as error:
            return Verdict({INDEX: str(error)})
    for path in weight_files(place):
        try:
            there = header_of(path).entries
        except CheckpointError as error:
            verdict.bad[path.name] = str(error)
            continue
        lacking = [name for name, file in index.items() if file == path.name and name not in there]
        if lacking:
            verdict.bad[path.name] = f"the index has {lacking[0]!r} in it, and it lacks it"
            continue
        verdict.good.append(path.name)
        verdict.unhashed.append(path.name)
    return verdict
