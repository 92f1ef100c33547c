"""Which part of each parameter a rank has between two steps.

With `use_orig_params` a parameter is, on each rank, the piece of it that fell into this rank's part of the unit: flat,
and empty on a rank that holds none of it. The pieces lie in rank order, so the whole parameter is what one gets by
laying them end to end; the optimizer's state for it lies in the same way. Under `sharding = "hybrid"` each group of
ranks has all the pieces of a whole.
"""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from parallel_core import ranks
from parallel_core.local_shards import LocalShard
from parallel_core.record import bare_parameters, bare_shapes, parameter_names
from parallel_core_fsdp.model_state import buffers


def local_shards(model: nn.Module) -> dict[str, LocalShard]:
    """Return what this rank holds; see the hook `local_shards`."""
    names, shapes, starts = parameter_names(model), bare_shapes(model), piece_starts(model)
    shards: dict[str, LocalShard] = {}
    for name, parameter in bare_parameters(model).items():
        shard = LocalShard.flat(parameter.reshape(-1), shapes[name], starts[name])
        shards |= dict.fromkeys(names[parameter], shard)
    return shards | {name: LocalShard.of(buffer) for name, buffer in buffers(model)}


def piece_sizes(model: nn.Module) -> dict[str, list[int]]:
    """Return how many elements of each parameter the ranks of this rank's group hold, in their order; a collective."""
    parameters, shapes = bare_parameters(model), bare_shapes(model)
    gathered = ranks.all_gather([parameter.numel() for parameter in parameters.values()])
    members = [gathered[member] for member in dist.get_process_group_ranks(sharding_group(model))]
    sizes = {name: [sizes[index] for sizes in members] for index, name in enumerate(parameters)}
    for name, pieces in sizes.items():
        assert sum(pieces) == math.prod(shapes[name]), f"{name}: pieces of {pieces} don't make up {shapes[name]}"
    return sizes


def piece_starts(model: nn.Module) -> dict[str, int]:
    """Return which element of each whole parameter the first one of this rank's piece is; a collective."""
    place = dist.get_rank(sharding_group(model))
    return {name: sum(sizes[:place]) for name, sizes in piece_sizes(model).items()}


def sharding_group(model: nn.Module) -> dist.ProcessGroup:
    """Return the ranks that hold one whole of the model between them."""
    assert isinstance(model, FullyShardedDataParallel)  # what wrap_model returned
    assert model.process_group is not None  # made of the mesh
    return model.process_group
