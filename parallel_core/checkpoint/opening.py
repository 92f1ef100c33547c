"""A saved checkpoint, or weights from elsewhere, as one kind of thing: tensors in pieces in files of a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from parallel_core.checkpoint.folder import path_of, standing
from parallel_core.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    Origin,
    Piece,
    SavedFile,
    SavedTensor,
    Section,
    read_manifest,
)
from parallel_core.checkpoint.safetensors_format import Header, read_header
from parallel_core.checkpoint.sense import is_plain_name
from parallel_core.checkpoint.untrusted import open_file, parsed, read_file, size_of, told_of_reading
from parallel_core.errors import CheckpointError

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
OF_A_CHECKPOINT = ("model-rank-", "optimizer", "objects")  # what begins the names of files that only a save writes

_BLOCK = 4 * 2**20  # bytes read at a time to take a hash


@dataclass(frozen=True)
class Saved:
    """What lies on the disk.

    Attributes:
        place: what the caller called it.
        folder: where the files are.
        manifest: what they are. Weights from elsewhere are given one, without hashes.
        is_checkpoint: whether the manifest is a saved one.
    """

    place: Path
    folder: Path
    manifest: Manifest
    is_checkpoint: bool


def open_saved(path: str | os.PathLike[str]) -> Saved:
    """Return what lies at a place: a checkpoint, a safetensors file, or a folder of them. No torch is needed.

    Raises:
        CheckpointError: there is no such thing, or it is damaged.
    """
    none_yet = ", which latest_checkpoint returns where there is no checkpoint yet; start from the beginning then"
    place = path_of(path, "path", if_none=none_yet)
    with told_of_reading(place):
        folder = standing(place)
        if (folder / MANIFEST).exists() or not folder.exists():
            return Saved(place, folder, read_manifest(folder), is_checkpoint=True)
        files = weight_files(folder)
        return Saved(place, files[0].parent, _manifest_of(files), is_checkpoint=False)


def check_sizes(saved: Saved) -> None:
    """Make sure that all files are there and as large as they were.

    Raises:
        CheckpointError: one is not.
    """
    for file in saved.manifest.files:
        path = saved.folder / file.name
        if (size := size_of(path)) != file.size:
            raise CheckpointError(f"{path} is damaged: it has {size} bytes, and was saved with {file.size}")


def check_hashes(saved: Saved, files: Iterable[SavedFile]) -> None:
    """Make sure that files are what was saved; those that were saved without a hash are left out.

    Raises:
        CheckpointError: one is not.
    """
    for file in files:
        if file.sha256 is not None and hash_of(saved.folder / file.name) != file.sha256:
            raise CheckpointError(f"{saved.folder / file.name} is damaged: its content is not what was saved")


def hash_of(path: Path, told: Callable[[int], None] | None = None) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal.

    Args:
        path: of the file.
        told: is called with a number of bytes, each time that so many have been read.

    Raises:
        CheckpointError: it can't be read.
    """
    digest = hashlib.sha256()
    block = bytearray(_BLOCK)
    with told_of_reading(path), os.fdopen(open_file(path), "rb", buffering=0) as file:
        while count := file.readinto(block):
            digest.update(memoryview(block)[:count])
            if told is not None:
                told(count)
    return digest.hexdigest()


def header_of(path: Path) -> Header:
    """Return the header of a safetensors file.

    Raises:
        CheckpointError: it can't be read, or is none.
    """
    descriptor = open_file(path)
    try:
        return read_header(descriptor, path)
    finally:
        os.close(descriptor)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_index(folder: Path) -> dict[str, str] | None:
    """Return which file of a folder has which tensor, as the index beside weights in several files says; None without.

    Raises:
        CheckpointError: it can't be read, or names none, or files elsewhere.
    """
    index = folder / INDEX
    if not index.is_file():
        return None
    weight_map = parsed(read_file(index), _Index, f"{index} can't be read").weight_map
    if not weight_map:
        raise CheckpointError(f"{index} names no file")
    if wrong := [name for name in weight_map.values() if not is_plain_name(name)]:
        raise CheckpointError(f"{index} names the file {wrong[0]!r}, which is not one of its own folder")
    return weight_map


def weight_files(place: Path) -> list[Path]:
    """Return the files of weights from elsewhere: those of an index, the one of the usual name, or the only one.

    Args:
        place: a folder, or one file.

    Raises:
        CheckpointError: there is none, or there are several and nothing says which belong together.
    """
    if place.is_file():
        return [place]
    if (index := read_index(place)) is not None:
        return [place / name for name in sorted(set(index.values()))]
    files = sorted(place.glob("*.safetensors"))
    if any(file.name.startswith(OF_A_CHECKPOINT) for file in files):
        raise CheckpointError(
            f"{place} is no complete checkpoint: it lacks {MANIFEST}; use another one, or name a file to load weights"
        )
    if place / WEIGHTS in files:
        return [place / WEIGHTS]
    if len(files) > 1:
        raise CheckpointError(
            f"{place} has several .safetensors files and neither {MANIFEST} nor {INDEX}; name the one to load"
        )
    if not files:
        inside = sorted(path.parent.name for path in place.glob(f"*/{MANIFEST}"))
        hint = f"; it is a folder of checkpoints, name one of them, such as {inside[-1]}" if inside else ""
        raise CheckpointError(
            f"{place} is no complete checkpoint: it lacks {MANIFEST}, and there is no .safetensors file{hint}"
        )
    return files


def _manifest_of(files: list[Path]) -> Manifest:
    """Return a manifest of weights from elsewhere, by the headers of the files."""
    tensors: dict[str, SavedTensor] = {}
    tied: list[tuple[str, str]] = []
    for index, path in enumerate(files):
        header = header_of(path)
        for name in header.entries:
            if name in tensors:
                raise CheckpointError(f"{path} has {name!r}, which another file of the folder has too")
            info = header.info(name)
            piece = Piece(index, (0,) * len(info.shape), info.shape)
            tensors[name] = SavedTensor(info.dtype, info.shape, pieces=(piece,))
        # As `safetensors.torch.save_model` notes the names that it leaves out, each with the one that stands for it.
        # `format` is what all files say of the tool that they are for.
        notes = header.metadata.items()
        tied += [(kept, left_out) for left_out, kept in notes if kept in header.entries and left_out != "format"]
    return Manifest(
        state_dict_type="full",
        world_size=1,
        saved_at=0,
        origin=Origin("unknown"),
        files=tuple(SavedFile(path.name, size_of(path)) for path in files),
        model=Section(tensors),
        tied=tuple(group for group in tied if group[1] not in tensors),
    )
