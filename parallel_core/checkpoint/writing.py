"""Tensors on their way to the disk: a file from its first byte to its last, a bounded part in hand at a time."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import torch

from parallel_core.checkpoint.manifest import SavedFile
from parallel_core.checkpoint.safetensors_format import TensorInfo, encode_header, file_order
from parallel_core.checkpoint.tensor_bytes import chunks, dtype_named, in_a_row, memory, runs_of
from parallel_core.errors import CheckpointError
from parallel_core.local_shards import LocalShard, Region


@contextmanager
def told_of(path: Path) -> Iterator[None]:
    """Say which file could not be written.

    Raises:
        CheckpointError: the block failed with an error of the system: the disk is full, say.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} can't be written: {error.strerror or error}") from error


_AT_ONCE = 2**20  # bytes that the system is asked to write


class TensorFile:
    """A safetensors file that is being written: the header first, then all bytes in the order of `file_order`."""

    def __init__(
        self, path: Path, infos: Mapping[str, TensorInfo], *, checksum: bool, metadata: Mapping[str, str] | None = None
    ) -> None:
        self._path = path
        self._hash = hashlib.sha256() if checksum else None
        self._size = 0
        with told_of(path):
            self._file = path.open("xb", buffering=0)
        try:
            self.write(memoryview(encode_header(infos, metadata or {})))
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, data: memoryview) -> None:
        """Write the next bytes."""
        self._size += data.nbytes
        with told_of(self._path):
            while data.nbytes:
                # Not more at once: much larger writes take several times as long to find room in the page cache.
                count = self._file.write(data[:_AT_ONCE])
                if self._hash is not None:
                    self._hash.update(data[:count])
                data = data[count:]

    def finish(self) -> SavedFile:
        """Make sure that all is on the disk, and return what the manifest says of the file."""
        with told_of(self._path):
            os.fsync(self._file.fileno())
        return SavedFile(self._path.name, self._size, self._hash.hexdigest() if self._hash is not None else None)


def write_shards(
    path: Path, shards: Mapping[str, LocalShard], dtypes: Mapping[str, str], *, checksum: bool
) -> SavedFile:
    """Write this rank's shards into a file of its own.

    Args:
        path: of the file.
        shards: by name.
        dtypes: what each is to be saved in.
        checksum: whether the file's hash is taken.

    Raises:
        CheckpointError: it can't be written.
    """
    infos = {name: TensorInfo(dtypes[name], shard.region.sizes) for name, shard in shards.items()}
    with TensorFile(path, infos, checksum=checksum) as file:
        for name in file_order(infos):
            for part in chunks(name, in_a_row(shards[name].tensor), dtype_named(dtypes[name])):
                file.write(memory(part))
        return file.finish()


def write_file(path: Path, content: bytes, *, checksum: bool) -> SavedFile:
    """Write a small file of any kind.

    Raises:
        CheckpointError: it can't be written.
    """
    with told_of(path), path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return SavedFile(path.name, len(content), hashlib.sha256(content).hexdigest() if checksum else None)


def divided(infos: Mapping[str, TensorInfo], stem: str, max_file_bytes: int | None) -> dict[str, dict[str, TensorInfo]]:
    """Return which tensors go into which file, by the file's name.

    Args:
        infos: the tensors.
        stem: what the names begin with: `model` gives `model.safetensors`, or `model-00001-of-00003.safetensors`.
        max_file_bytes: how many bytes of tensors a file may have, unless it has one tensor alone; None for one file.
    """
    parts: list[dict[str, TensorInfo]] = [{}]
    size = 0
    for name, info in infos.items():
        if parts[-1] and max_file_bytes is not None and size + info.nbytes > max_file_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = info
        size += info.nbytes
    if len(parts) == 1:
        return {f"{stem}.safetensors": parts[0]}
    return {f"{stem}-{index:05}-of-{len(parts):05}.safetensors": part for index, part in enumerate(parts, start=1)}


def index_of(files: Mapping[str, Mapping[str, TensorInfo]]) -> bytes:
    """Return the content of the index that tools expect beside weights in several files."""
    weight_map = {name: file for file, infos in files.items() for name in infos}
    total = sum(info.nbytes for infos in files.values() for info in infos.values())
    return msgspec.json.format(msgspec.json.encode({"metadata": {"total_size": total}, "weight_map": weight_map}))


def steps(infos: Mapping[str, TensorInfo]) -> Iterator[tuple[str, Region]]:
    """Yield the parts of a file of whole tensors, in the order of its bytes: a name, and a run of that tensor."""
    for name in file_order(infos):
        for run in runs_of(infos[name]):
            yield name, run


def empty_bytes(count: int) -> torch.Tensor:
    """Return memory for so many bytes."""
    return torch.empty(count, dtype=torch.uint8, device="cpu")
