"""The manifest: what a checkpoint consists of. It is written last, and a folder without one is no checkpoint.

Its text begins with the SHA-256 of itself, taken with zeros in the place of the number, so that no byte of it can
change unseen. No torch is needed to read it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec

from parallel_core.checkpoint.safetensors_format import TensorInfo
from parallel_core.checkpoint.sense import check_sense
from parallel_core.checkpoint.untrusted import parsed, read_file
from parallel_core.errors import CheckpointError

MANIFEST = "manifest.json"
RANDOM_STATES = "random-states.json"
SCHEMA = 1

_HEAD, _TAIL = b'{"sha256":"', b'",'
_DIGITS = 64
_BODY = len(_HEAD) + _DIGITS + len(_TAIL)  # where the text begins that the number is taken of


class SavedFile(msgspec.Struct, frozen=True):
    """A file of the checkpoint.

    Attributes:
        name: in the checkpoint's folder.
        size: in bytes.
        sha256: of its content, in hexadecimal; None where the checkpoint was saved without.
    """

    name: str
    size: int
    sha256: str | None = None


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Elements of a tensor that lie in one file, under the tensor's name.

    Attributes:
        file: which of the manifest's files.
        offsets, sizes: the box that they are of the tensor, one number for each dimension; or, where the tensor has not
            one dimension and there is one number, a run of it in row-major order.
    """

    file: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SavedTensor(TensorInfo, frozen=True, kw_only=True):
    """A tensor of the checkpoint: its dtype, its shape, and the pieces that make it up."""

    pieces: tuple[Piece, ...]


class Section(msgspec.Struct, frozen=True):
    """A part of the training that was saved: the model, the optimizer, or the other objects.

    Attributes:
        tensors: by name.
        values: everything that is no tensor, with references to these. The model's are the extra states by name; the
            optimizer's are `OptimizerValues`; those of the objects are their states by name. Each state is as
            `parallel_core.checkpoint.tree` has it.
    """

    tensors: dict[str, SavedTensor] = {}
    values: dict[str, Any] | None = None


class Origin(msgspec.Struct, frozen=True):
    """Where a checkpoint comes from, for people to read; nothing depends on it.

    Attributes:
        strategy: what the model was wrapped with (`fsdp (parallel-core-fsdp 0.1.0)`).
        config: all settings of the wrap; empty for a bare model.
        optimizer: the optimizer's class, or None.
        versions: of the packages that wrote it.
    """

    strategy: str
    config: dict[str, Any] = {}
    optimizer: str | None = None
    versions: dict[str, str] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint consists of.

    Attributes:
        schema: the version of this format.
        state_dict_type: `full` or `sharded`.
        world_size: how many ranks saved it.
        saved_at: when it was complete, in seconds since 1970 (UTC).
        origin: where it comes from.
        files: all files but the manifest.
        model: the weights and buffers; its values are the extra states by name.
        tied: the names of each tensor that has more than one. It is saved under the first.
        optimizer: its state by parameter name and its parameter groups, or None.
        objects: what else was handed over by name, with its state.
        extra: the caller's own data.
        random_states: whether the states of the generators of random numbers were saved, in `RANDOM_STATES`.
    """

    schema: int = SCHEMA
    state_dict_type: str
    world_size: int
    saved_at: float
    origin: Origin
    files: tuple[SavedFile, ...]
    model: Section
    tied: tuple[tuple[str, ...], ...] = ()
    optimizer: Section | None = None
    objects: Section = Section()
    extra: Any = None
    random_states: bool = False

    @property
    def nbytes(self) -> int:
        """How many bytes the files take."""
        return sum(file.size for file in self.files)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write a checkpoint's manifest and make sure that it is on the disk.

    Raises:
        OSError: it can't be written.
    """
    body = msgspec.json.encode(manifest)[1:] + b"\n"
    digest = _digest(body)
    with (folder / MANIFEST).open("xb") as file:
        file.write(_HEAD + digest.encode() + _TAIL + body)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint, whose own number has been checked.

    Raises:
        CheckpointError: there is none, or it is not as it was written.
    """
    path = folder / MANIFEST
    if not path.exists():
        what = f"it lacks {MANIFEST}" if folder.is_dir() else "there is no such folder"
        raise CheckpointError(f"{folder} is no complete checkpoint: {what}")
    text = read_file(path)
    if not is_intact(text):
        raise CheckpointError(f"{path} is damaged: it is not as it was written; use another checkpoint")
    body = b"{" + text[_BODY:]
    schema = parsed(body, _Schema, f"{path} is no manifest of a checkpoint").schema
    if schema != SCHEMA:
        raise CheckpointError(
            f"{path} has the schema {schema}, and this version of parallel_core reads {SCHEMA}; use the version that "
            f"wrote it"
        )
    manifest = parsed(body, Manifest, f"{path} is no manifest of a checkpoint")
    try:
        check_sense(manifest, RANDOM_STATES)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is not sensible: {error}; use another checkpoint") from error
    return manifest


def is_intact(text: bytes) -> bool:
    """Tell whether the text of a manifest is as it was written, by the number that it begins with."""
    body = text[_BODY:]
    return text[:_BODY] == _HEAD + _digest(body).encode() + _TAIL


def has_manifest(folder: Path) -> bool:
    """Tell whether a folder has a manifest of this format, whole or damaged: other programs have files of that name."""
    try:
        with (folder / MANIFEST).open("rb") as file:
            return file.read(len(_HEAD)) == _HEAD
    except OSError:
        return False


class _Schema(msgspec.Struct):
    schema: int


def _digest(body: bytes) -> str:
    return hashlib.sha256(_HEAD + b"0" * _DIGITS + _TAIL + body).hexdigest()
