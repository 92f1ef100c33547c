"""A job becomes a checkpoint: its files are written, then the manifest, then the folder is put in its place."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from parallel_core import ranks
from parallel_core.checkpoint.folder import check_place, folder_to_build, publish
from parallel_core.checkpoint.gathering import write_whole
from parallel_core.checkpoint.job import Job, written_here
from parallel_core.checkpoint.listing import prune
from parallel_core.checkpoint.manifest import (
    RANDOM_STATES,
    Manifest,
    Piece,
    SavedFile,
    SavedTensor,
    Section,
    write_manifest,
)
from parallel_core.checkpoint.opening import INDEX
from parallel_core.checkpoint.telling import as_checkpoint_error
from parallel_core.checkpoint.writing import divided, index_of, told_of, write_file, write_shards
from parallel_core.errors import CheckpointError
from parallel_core.hookspecs import StateDictType


@as_checkpoint_error()
def write(job: Job) -> None:
    """Write a checkpoint and put it in its place; a collective over the job's group.

    Raises:
        CheckpointError: it failed on a rank; the same error on every rank. Where a rank is lost after the last file was
            written, the checkpoint may stand in its place, whole.
    """
    place, group = job.options.place, job.group
    with ExitStack() as stack:
        folder: Path | None = None
        with ranks.agreement(CheckpointError, group):
            if job.rank == 0:
                with told_of(place):
                    check_place(place)
                    folder = stack.enter_context(folder_to_build(place))
        folder = Path(ranks.broadcast(str(folder), group))
        files: list[SavedFile] = []
        sections: dict[str, dict[str, SavedTensor]] = {}
        for name in job.parts:
            written = _write_full if job.options.state_dict_type is StateDictType.FULL else _write_sharded
            sections[name] = written(job, name, folder, files)
        with ranks.agreement(CheckpointError, group):
            if job.rank == 0:
                if job.random_states:
                    text = msgspec.json.encode(job.random_states)
                    files.append(write_file(folder / RANDOM_STATES, text, checksum=job.options.checksum))
                with told_of(place):
                    write_manifest(folder, _manifest(job, sections, files))
                    publish(folder, place)
                if job.options.keep_last is not None:
                    prune(place, job.options.keep_last)


def _write_sharded(job: Job, name: str, folder: Path, files: list[SavedFile]) -> dict[str, SavedTensor]:
    """Write this rank's file of one part; return the tensors of all ranks, and note their files."""
    tensors = job.plans[name]
    shards = written_here(job, name)
    written: SavedFile | None = None
    with ranks.agreement(CheckpointError, job.group):
        if shards or name == "model":
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder.parent} is not the same folder as on rank 0; use one that all ranks see"
                )
            path = folder / f"{name}-rank-{job.rank:05}-of-{job.world_size:05}.safetensors"
            dtypes = {key: tensors[key].info.dtype for key in shards}
            written = write_shards(path, shards, dtypes, checksum=job.options.checksum)
    index_of_rank: dict[int, int] = {}
    for owner, file in enumerate(ranks.all_gather(written, job.group)):
        if file is not None:
            index_of_rank[owner] = len(files)
            files.append(file)
    return {
        key: SavedTensor(
            tensor.info.dtype,
            tensor.info.shape,
            pieces=tuple(Piece(index_of_rank[owner], at.offsets, at.sizes) for owner, at in tensor.pieces),
        )
        for key, tensor in tensors.items()
    }


def _write_full(job: Job, name: str, folder: Path, files: list[SavedFile]) -> dict[str, SavedTensor]:
    """Write one part's tensors whole, on rank 0; return them, and note their files."""
    tensors = job.plans[name]
    if not tensors and name != "model":
        return {}
    parts = divided({key: each.info for key, each in tensors.items()}, name, job.options.max_file_bytes)
    # As `safetensors.torch.load_model` expects it of names that stand for one tensor.
    tied = {again: group[0] for group in job.draft.tied for again in group[1:]} if name == "model" else {}
    written = write_whole(job, name, folder, parts, metadata=tied)
    index_of_file = {file: len(files) + number for number, file in enumerate(parts)}
    files += written
    if len(parts) > 1 and name == "model":
        with ranks.agreement(CheckpointError, job.group):
            if job.rank == 0:
                files.append(write_file(folder / INDEX, index_of(parts), checksum=job.options.checksum))
    return {
        key: SavedTensor(
            info.dtype, info.shape, pieces=(Piece(index_of_file[file], (0,) * len(info.shape), info.shape),)
        )
        for file, infos in parts.items()
        for key, info in infos.items()
    }


def _manifest(job: Job, sections: dict[str, dict[str, SavedTensor]], files: list[SavedFile]) -> Manifest:
    def filled(section: Section, name: str) -> Section:
        return Section(sections[name], section.values)

    return msgspec.structs.replace(
        job.draft,
        saved_at=time.time(),
        files=tuple(files),
        model=filled(job.draft.model, "model"),
        optimizer=None if job.draft.optimizer is None else filled(job.draft.optimizer, "optimizer"),
        objects=filled(job.draft.objects, "objects"),
        random_states=bool(job.random_states),
    )
