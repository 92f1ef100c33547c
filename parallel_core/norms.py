"""Norms of gradients in shards that torch can't take: nothing has no largest element, and a rank may hold nothing."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from parallel_core.tensors import is_dtensor


def needs_care(gradients: list[torch.Tensor], norm_type: float) -> bool:
    """Return whether a norm of these has no value for a shard without elements; the same on every rank."""
    return (norm_type < 0 or norm_type == math.inf) and bool(gradients) and all(map(is_dtensor, gradients))


@torch.no_grad()
def clip(gradients: list[torch.Tensor], max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale DTensors, cut over the last dimension of their mesh, as `clip_grad_norm_` of torch does; a collective.

    Returns:
        the norm before: that of all elements, which is the norm of the tensors' norms.
    """
    local = [gradient.to_local() for gradient in gradients if is_dtensor(gradient)]
    held = [shard for shard in local if shard.numel()]
    norms = [torch.linalg.vector_norm(shard, norm_type) for shard in held]
    nothing = local[0].new_full((), 0.0 if norm_type == math.inf else math.inf)
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([nothing, *norms]), norm_type)
    if math.isinf(norm_type):
        dist.all_reduce(norm, op=dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN)
    else:
        mesh = next(gradient.device_mesh for gradient in gradients if is_dtensor(gradient))
        norm = norm**norm_type  # of infinity, nothing
        dist.all_reduce(norm, group=mesh.get_group(mesh.ndim - 1))
        norm = norm ** (1 / norm_type)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for shard in held:
        shard.mul_(scale.to(shard.device))
    return norm
