"""`save_checkpoint`: from what the ranks hold to a folder that is whole or not there."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from parallel_core import ranks
from parallel_core.answering import settled
from parallel_core.checkpoint import background as in_background
from parallel_core.checkpoint.background import CheckpointSave
from parallel_core.checkpoint.contents import Part, model_part, objects_part, optimizer_part
from parallel_core.checkpoint.folder import check_place, checkpoint_path, folder_to_build, prune, publish
from parallel_core.checkpoint.gathering import write_whole
from parallel_core.checkpoint.manifest import (
    RANDOM_STATES,
    Manifest,
    Origin,
    Piece,
    SavedFile,
    SavedTensor,
    Section,
    write_manifest,
)
from parallel_core.checkpoint.opening import INDEX
from parallel_core.checkpoint.plan import Held, PlannedTensor, planned
from parallel_core.checkpoint.random_states import random_state as random_state_now
from parallel_core.checkpoint.safetensors_format import METADATA
from parallel_core.checkpoint.telling import as_checkpoint_error
from parallel_core.checkpoint.tensor_bytes import dtype_name, info_of
from parallel_core.checkpoint.tree import encode
from parallel_core.checkpoint.writing import divided, index_of, told_of, write_file, write_shards
from parallel_core.errors import CheckpointError
from parallel_core.hookspecs import StateDictType
from parallel_core.local_shards import LocalShard
from parallel_core.record import Layout, Record
from parallel_core.state_dicts import parse_state_dict_type


@dataclass(frozen=True)
class Options:
    """What `save_checkpoint` was asked for, checked; must be the same on every rank."""

    place: Path
    state_dict_type: StateDictType
    dtype: str | None
    max_file_bytes: int | None
    keep_last: int | None
    checksum: bool
    random_state: bool


@dataclass(frozen=True)
class Job:
    """All that is known before the first byte is written.

    Attributes:
        options: what was asked for.
        parts: what this rank has to save: of the model, the optimizer, the objects.
        plans: who writes what of each part.
        draft: the manifest, without what is known only when the files are there.
        random_states: of every rank, or empty.
        group: the process group to talk through; None for the default one.
    """

    options: Options
    parts: dict[str, Part]
    plans: dict[str, dict[str, PlannedTensor]]
    draft: Manifest
    random_states: list[Any]
    group: dist.ProcessGroup | None


@as_checkpoint_error()
def save_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    state_dict_type: StateDictType | str = StateDictType.SHARDED,
    extra: Any = None,
    objects: Mapping[str, Any] | None = None,
    random_state: bool = False,
    dtype: torch.dtype | None = None,
    max_file_bytes: int | None = None,
    keep_last: int | None = None,
    checksum: bool = True,
    background: bool = False,
) -> CheckpointSave:
    """Save the training as it is into a folder, which is there as a whole afterwards or as it was before.

    Call it on every rank, with the same arguments. No rank ever holds more of another rank's tensors than a bounded
    piece.

    Args:
        path: the checkpoint's own folder (`runs/a/step-000100`), on a file system that all ranks see. A checkpoint that
            stands there is replaced.
        model: the model, wrapped or bare.
        optimizer: its optimizer, of any kind; reading its state never changes it.
        state_dict_type: `sharded`: a safetensors file for each rank; `full`: `model.safetensors`, written by rank 0,
            which any tool can open. Either loads under any strategy, on any number of ranks.
        extra: data of your own: dicts, lists, tuples, numbers, strings, bytes and None. Rank 0's is saved; the other
            ranks pass the same, or None.
        objects: other objects by name that have `state_dict` and `load_state_dict`, such as a learning-rate scheduler.
        random_state: whether the states of each rank's generators of random numbers are saved too.
        dtype: what the weights of floating point are saved in, to export them; by default what they are trained in.
        max_file_bytes: for `full`: how many bytes of weights go into one file before the next is begun.
        keep_last: after the save, remove the oldest checkpoints of the same parent folder until so many are left.
        checksum: whether to take the SHA-256 of each file, by which a load finds a changed byte.
        background: return as soon as what is to be saved has been copied, and write while training goes on. The next
            save or load waits for the end, and so does the end of the process group and of the process.

    Returns:
        the save, to wait for where it goes on in the background.

    Raises:
        CheckpointError: it can't be saved; the same error on every rank, and what stood at `path` still does.
    """
    in_background.wait_for_running()
    record, strategy, model = settled(model)
    layout = Layout.of(model) if record is None else record.layout
    with ranks.agreement(CheckpointError):
        options = _options(path, state_dict_type, dtype, max_file_bytes, keep_last, checksum, random_state)
    check_alike("save", options, {"optimizer": optimizer is not None, "background": background})
    with ranks.agreement(CheckpointError):
        parts = {"model": model_part(strategy, model, layout)}
    if optimizer is not None:
        with ranks.agreement(CheckpointError):
            parts["optimizer"] = optimizer_part(strategy, model, optimizer, parts["model"].shards)
    with ranks.agreement(CheckpointError):
        parts["objects"] = objects_part(objects or {})
        encoded = None if extra is None else encode(extra, "extra")
    job = _agreed(options, parts, encoded, layout, _origin(record, strategy.name, optimizer), background=background)
    if not background:
        write(job)
        return CheckpointSave(options.place)
    return in_background.start(options.place, partial(write, _copied(job)))


@as_checkpoint_error()
def write(job: Job) -> None:
    """Write a checkpoint and put it in its place; a collective over the job's group.

    Raises:
        CheckpointError: it failed on a rank; the same error on every rank.
    """
    place, group = job.options.place, job.group
    with ExitStack() as stack:
        folder: Path | None = None
        with ranks.agreement(CheckpointError, group):
            if ranks.rank() == 0:
                check_place(place)
                with told_of(place):
                    folder = stack.enter_context(folder_to_build(place))
        folder = Path(ranks.broadcast(str(folder), group))
        files: list[SavedFile] = []
        sections: dict[str, dict[str, SavedTensor]] = {}
        for name in job.parts:
            written = _write_full if job.options.state_dict_type is StateDictType.FULL else _write_sharded
            sections[name] = written(job, name, folder, files)
        with ranks.agreement(CheckpointError, group):
            if ranks.rank() == 0:
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
    mine, count = ranks.rank(), ranks.world_size()
    tensors = job.plans[name]
    shards = _written_here(job, name)
    written: SavedFile | None = None
    with ranks.agreement(CheckpointError, job.group):
        if shards or name == "model":
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder.parent} is not the same folder as on rank 0; use one that all ranks see"
                )
            path = folder / f"{name}-rank-{mine:05}-of-{count:05}.safetensors"
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
    shards = job.parts[name].shards
    written = write_whole(folder, parts, tensors, shards, job.group, checksum=job.options.checksum, metadata=tied)
    index_of_file = {file: len(files) + number for number, file in enumerate(parts)}
    files += written
    if len(parts) > 1 and name == "model":
        with ranks.agreement(CheckpointError, job.group):
            if ranks.rank() == 0:
                files.append(write_file(folder / INDEX, index_of(parts), checksum=job.options.checksum))
    return {
        key: SavedTensor(
            info.dtype, info.shape, pieces=(Piece(index_of_file[file], (0,) * len(info.shape), info.shape),)
        )
        for file, infos in parts.items()
        for key, info in infos.items()
    }


def _options(
    path: str | os.PathLike[str],
    state_dict_type: StateDictType | str,
    dtype: torch.dtype | None,
    max_file_bytes: int | None,
    keep_last: int | None,
    checksum: bool,
    random_state: bool,
) -> Options:
    kind = parse_state_dict_type(state_dict_type)
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise CheckpointError(
            f"dtype: expected a torch.dtype of floating point such as torch.bfloat16, found {dtype!r}"
        )
    for name, value in (("max_file_bytes", max_file_bytes), ("keep_last", keep_last)):
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(f"{name}: expected a whole number from 1 on or None, found {value!r}")
    if max_file_bytes is not None and kind is StateDictType.SHARDED:
        raise CheckpointError("max_file_bytes is for state_dict_type='full'; under 'sharded' each rank has one file")
    saved_dtype = None if dtype is None else dtype_name(dtype)
    return Options(checkpoint_path(path), kind, saved_dtype, max_file_bytes, keep_last, bool(checksum), random_state)


def check_alike(what: str, options: Any, given: dict[str, bool]) -> None:
    """Agree that all ranks were asked for the same; a collective.

    Raises:
        CheckpointError: they were not; the same error on every rank.
    """
    for rank, asked in enumerate(gathered := ranks.all_gather((options, given))):
        if asked != gathered[0]:
            raise CheckpointError(
                f"every rank must {what} in the same way, found {gathered[0]} on rank 0 and {asked} on rank {rank}"
            )


def _agreed(
    options: Options, parts: dict[str, Part], extra: Any, layout: Layout, origin: Origin, *, background: bool
) -> Job:
    """Return the job that all ranks do; a collective.

    Raises:
        CheckpointError: what they hold does not fit together; the same error on every rank.
    """
    with ranks.agreement(CheckpointError):
        held = {name: {key: _held(key, shard) for key, shard in part.shards.items()} for name, part in parts.items()}
    told = {name: msgspec.json.encode(part.values) for name, part in parts.items() if name == "objects"}
    told["extra"] = msgspec.json.encode(extra)
    gathered = ranks.all_gather((held, told))
    for rank, (_, values) in enumerate(gathered):
        for what, value in values.items():
            if value != gathered[0][1][what] and value != b"null":
                raise CheckpointError(
                    f"{what} is not the same on rank {rank} as on rank 0, and there is room for one; pass the same, or "
                    f"gather what differs (parallel_core.ranks.all_gather)"
                )
    plans = {
        name: planned(
            [tables[name] for tables, _ in gathered],
            name,
            dtype=options.dtype if name == "model" else None,
            one_writer=options.state_dict_type is StateDictType.FULL,
        )
        for name in parts
    }
    draft = Manifest(
        state_dict_type=options.state_dict_type.value,
        world_size=ranks.world_size(),
        saved_at=0,
        origin=origin,
        files=(),
        model=Section(values=ranks.broadcast(parts["model"].values)),
        tied=layout.tied,
        optimizer=Section(values=_united(parts["optimizer"].values)) if "optimizer" in parts else None,
        objects=Section(values=parts["objects"].values),
        extra=ranks.broadcast(extra),
    )
    random_states = ranks.all_gather(random_state_now()) if options.random_state else []
    needs_group = background or (options.state_dict_type is StateDictType.FULL and not _serves_cpu())
    return Job(options, parts, plans, draft, random_states, in_background.group_apart() if needs_group else None)


def _held(name: str, shard: LocalShard) -> Held:
    if name == METADATA:
        raise CheckpointError(f"{name!r} can't be the name of a saved tensor: it is the format's own; choose another")
    try:
        return Held(info_of(shard.tensor).dtype, shard.shape, shard.region, shard.alike)
    except CheckpointError as error:
        raise CheckpointError(f"{name!r}: {error}") from None


def _united(mine: dict[str, Any]) -> dict[str, Any]:
    """Return the values of an optimizer's state from all ranks; one that holds nothing of a parameter has none."""
    text = msgspec.json.encode(mine)
    if len(set(ranks.all_gather(hashlib.sha256(text).hexdigest()))) == 1:
        return mine
    found = [msgspec.json.decode(each) for each in ranks.all_gather(text)]
    state = {name: entries for each in reversed(found) for name, entries in each["state"].items()}
    return {"state": state, "param_groups": found[0]["param_groups"]}


def _serves_cpu() -> bool:
    return ranks.world_size() == 1 or "cpu" in dist.get_backend_config()


def _copied(job: Job) -> Job:
    """Return the job with copies of what this rank writes, in the memory of the host."""
    return replace(
        job,
        parts={
            name: Part(
                {
                    key: replace(shard, tensor=shard.tensor.to("cpu", copy=True))
                    for key, shard in _written_here(job, name).items()
                }
            )
            for name in job.parts
        },
    )


def _written_here(job: Job, name: str) -> dict[str, LocalShard]:
    """Return the shards of one part that this rank writes, or sends to who writes them."""
    mine = ranks.rank()
    return {
        key: job.parts[name].shards[key]
        for key, tensor in job.plans[name].items()
        if any(owner == mine for owner, _ in tensor.pieces)
    }


def _origin(record: Record | None, strategy: str, optimizer: torch.optim.Optimizer | None) -> Origin:
    return Origin(
        strategy=strategy if record is None else str(record.strategy),
        config={} if record is None else msgspec.to_builtins(record.config),
        optimizer=None if optimizer is None else type(optimizer).__name__,
        versions={
            "parallel_core": importlib.metadata.version("parallel-core"),
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    )


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
