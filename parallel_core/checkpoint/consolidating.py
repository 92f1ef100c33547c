"""A sharded checkpoint as a full one: whole tensors, written without ranks, a bounded part at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch

from parallel_core.checkpoint.folder import check_place, checkpoint_path, clean, folder_to_build, publish
from parallel_core.checkpoint.manifest import (
    RANDOM_STATES,
    Piece,
    SavedFile,
    SavedTensor,
    Section,
    write_manifest,
)
from parallel_core.checkpoint.opening import INDEX, Saved, check_sizes, open_saved
from parallel_core.checkpoint.reading import SavedReader
from parallel_core.checkpoint.safetensors_format import SIZES, TensorInfo, file_order
from parallel_core.checkpoint.tensor_bytes import CHUNK, dtype_named, in_dtype, memory, runs_of
from parallel_core.checkpoint.tree import tensor_names_of_each
from parallel_core.checkpoint.untrusted import read_file
from parallel_core.checkpoint.verifying import Told, nobody, verify_files
from parallel_core.checkpoint.writing import TensorFile, divided, index_of, told_of, write_file
from parallel_core.dtypes import dtype_name
from parallel_core.errors import CheckpointError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""What weights can be converted to."""

_SMALLEST_STEP = 2**16
_STEPS = 64  # that a small checkpoint is read in, at least: its bytes are not all in memory either


def consolidate(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int | None = None,
    verify: bool = True,
    checking: Told = nobody,
    writing: Told = nobody,
) -> Path:
    """Write a checkpoint once more, as a full one; no process group is needed.

    All that the source has is carried over, with the time at which it was saved: `latest_checkpoint` must not take it
    for newer than it is.

    Args:
        source: a checkpoint's folder.
        target: the folder to make. A checkpoint that stands there is replaced.
        dtype: what the model's weights of floating point are written in; by default what they were saved in. The
            optimizer's state and the extra states of modules stay as they are.
        max_file_bytes: how many bytes of tensors go into one file before the next is begun.
        verify: whether the files of the source are compared with their hashes first. Their sizes always are.
        checking, writing: are called as the source is compared, and as the target is written.

    Returns:
        the new folder.

    Raises:
        CheckpointError: the source is damaged, or the target can't be written; what stood there still does.
    """
    if dtype is not None and dtype not in DTYPES.values():
        raise CheckpointError(f"dtype: expected one of {', '.join(map(str, DTYPES.values()))} or None, found {dtype!r}")
    place = checkpoint_path(target)
    with told_of(place):
        check_place(place)
        if place.parent.is_dir():
            clean(place.parent)  # before anything is read: it puts folders back under their names
    saved = open_saved(source)
    if not saved.is_checkpoint:
        raise CheckpointError(
            f"{saved.place} is no checkpoint: its weights have no manifest, and are whole; expected a folder that "
            f"save_checkpoint has made"
        )
    one, other = saved.folder.resolve(), place.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise CheckpointError(f"the target {place} and the source {saved.place} overlap; choose a folder apart from it")
    if not verify:
        check_sizes(saved)
    elif bad := verify_files(saved, checking).bad:
        lines = [f"{name}: {reason}" for name, reason in bad.items()]
        raise CheckpointError("\n  - ".join([f"{saved.place} is damaged; use another checkpoint:", *lines]))
    with told_of(place), folder_to_build(place) as folder, SavedReader(saved) as reader:
        _Copy(saved, reader, folder, writing).run(dtype, max_file_bytes)
        publish(folder, place)
    return place


class _Copy:
    """One checkpoint on its way into a new folder."""

    def __init__(self, saved: Saved, reader: SavedReader, folder: Path, told: Told) -> None:
        manifest = saved.manifest
        self._saved = saved
        self._reader = reader
        self._folder = folder
        self._told = told
        self._files: list[SavedFile] = []
        self._done = 0
        sections = (manifest.model, manifest.optimizer or Section(), manifest.objects)
        self._total = sum(tensor.nbytes for section in sections for tensor in section.tensors.values())
        self._step = min(CHUNK, max(_SMALLEST_STEP, self._total // _STEPS))

    def run(self, dtype: torch.dtype | None, max_file_bytes: int | None) -> None:
        """Write all files, and the manifest at the end."""
        manifest = self._saved.manifest
        infos = _converted(manifest.model, dtype)
        # As `safetensors.torch.load_model` expects it of names that stand for one tensor.
        tied = {again: group[0] for group in manifest.tied for again in group[1:]}
        parts = divided(infos, "model", max_file_bytes)
        model = self._section(manifest.model, parts, tied)
        if len(parts) > 1:
            self._files.append(write_file(self._folder / INDEX, index_of(parts), checksum=True))
        optimizer = manifest.optimizer
        if optimizer is not None:
            optimizer = self._section(optimizer, divided(optimizer.tensors, "optimizer", max_file_bytes))
        objects = self._section(manifest.objects, divided(manifest.objects.tensors, "objects", max_file_bytes))
        if manifest.random_states:
            self._files.append(self._copied(RANDOM_STATES))
        changed = msgspec.structs.replace(
            manifest,
            state_dict_type="full",
            files=tuple(self._files),
            model=model,
            optimizer=optimizer,
            objects=objects,
        )
        write_manifest(self._folder, changed)

    def _section(
        self, section: Section, parts: Mapping[str, Mapping[str, TensorInfo]], metadata: Mapping[str, str] | None = None
    ) -> Section:
        """Write the files of one section."""
        if not section.tensors and section is not self._saved.manifest.model:
            return section
        tensors: dict[str, SavedTensor] = {}
        for name, infos in parts.items():
            with TensorFile(self._folder / name, infos, checksum=True, metadata=metadata) as file:
                for each in file_order(infos):
                    for elements in self._runs(each, section.tensors[each], infos[each]):
                        file.write(memory(elements))
                        del elements  # before the next ones are read
                written = file.finish()
            for key, info in infos.items():
                piece = Piece(len(self._files), (0,) * len(info.shape), info.shape)
                tensors[key] = SavedTensor(info.dtype, info.shape, pieces=(piece,))
            self._files.append(written)
        return Section({name: tensors[name] for name in section.tensors}, section.values)

    def _runs(self, name: str, tensor: SavedTensor, info: TensorInfo) -> Iterator[torch.Tensor]:
        """Yield the elements of a tensor in the dtype that they are to have, a bounded number at a time."""
        dtype = dtype_named(info.dtype)
        larger = max(tensor, info, key=lambda each: each.nbytes)
        for run in runs_of(TensorInfo(larger.dtype, tensor.shape), self._step):
            yield in_dtype(name, self._reader.run(name, tensor, run), dtype)
            self._done += run.numel * SIZES[tensor.dtype]
            self._told(self._done, self._total)

    def _copied(self, name: str) -> SavedFile:
        """Copy a small file as it is."""
        return write_file(self._folder / name, read_file(self._saved.folder / name), checksum=True)


def _converted(section: Section, dtype: torch.dtype | None) -> dict[str, TensorInfo]:
    """Return the model's tensors with the dtypes that they are to have."""
    kept = set(tensor_names_of_each(section.values))  # extra states: their modules expect what they returned
    return {
        name: TensorInfo(
            tensor.dtype
            if dtype is None or name in kept or not dtype_named(tensor.dtype).is_floating_point
            else dtype_name(dtype),
            tensor.shape,
        )
        for name, tensor in section.tensors.items()
    }
