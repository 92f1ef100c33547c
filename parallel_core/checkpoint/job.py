"""A save that all ranks have agreed on: all that is known before the first byte is written."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from parallel_core import ranks
from parallel_core.checkpoint.background import group_apart
from parallel_core.checkpoint.contents import Part
from parallel_core.checkpoint.manifest import Manifest, Origin, Section
from parallel_core.checkpoint.options import Options
from parallel_core.checkpoint.plan import Held, PlannedTensor, planned
from parallel_core.checkpoint.random_states import random_state
from parallel_core.checkpoint.safetensors_format import METADATA
from parallel_core.checkpoint.tensor_bytes import info_of
from parallel_core.checkpoint.tree import encode
from parallel_core.errors import CheckpointError
from parallel_core.hookspecs import StateDictType
from parallel_core.local_shards import LocalShard
from parallel_core.record import Layout, Record


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
        rank, world_size: of this process when the save began. The default group may be ended while it goes on.
    """

    options: Options
    parts: dict[str, Part]
    plans: dict[str, dict[str, PlannedTensor]]
    draft: Manifest
    random_states: list[Any]
    group: dist.ProcessGroup | None
    rank: int
    world_size: int


def agreed_job(
    options: Options, parts: dict[str, Part], extra: Any, layout: Layout, origin: Origin, *, background: bool
) -> Job:
    """Return the job that all ranks do; a collective.

    Raises:
        CheckpointError: what they hold does not fit together; the same error on every rank.
    """
    with ranks.agreement(CheckpointError):
        held = {name: {key: _held(key, shard) for key, shard in part.shards.items()} for name, part in parts.items()}
        told = {"objects": msgspec.json.encode(parts["objects"].values), "extra": msgspec.json.encode(extra)}
        generators = random_state() if options.random_state else None
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
            dtypes={} if options.dtype is None or name != "model" else dict.fromkeys(layout.entries, options.dtype),
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
        extra=msgspec.json.decode(gathered[0][1]["extra"]),
    )
    random_states = ranks.all_gather(generators) if options.random_state else []
    needs_group = background or (options.state_dict_type is StateDictType.FULL and not _serves_cpu())
    group = group_apart() if needs_group else None
    return Job(options, parts, plans, draft, random_states, group, ranks.rank(), ranks.world_size())


def copied_job(job: Job) -> Job:
    """Return the job with copies of what this rank writes, in the memory of the host."""
    return replace(
        job,
        parts={
            name: Part(
                {
                    key: replace(shard, tensor=shard.tensor.to("cpu", copy=True))
                    for key, shard in written_here(job, name).items()
                }
            )
            for name in job.parts
        },
    )


def written_here(job: Job, name: str) -> dict[str, LocalShard]:
    """Return the shards of one part that this rank writes, or sends to who writes them."""
    return {
        key: job.parts[name].shards[key]
        for key, tensor in job.plans[name].items()
        if any(owner == job.rank for owner, _ in tensor.pieces)
    }


def origin_of(record: Record | None, strategy: str, optimizer: torch.optim.Optimizer | None) -> Origin:
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


def _held(name: str, shard: LocalShard) -> Held:
    if name == METADATA:
        raise CheckpointError(f"{name!r} can't be the name of a saved tensor: it is the format's own; choose another")
    encode(name, "the name of a tensor")
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
