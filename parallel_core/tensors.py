"""One tensor between a rank and all ranks: gathered whole, put into its place, cut into shards.

For strategy authors too. Every function is a collective where a DTensor or more than one rank is involved: call it on
every rank in the same order.
"""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from parallel_core.errors import StateDictError
from parallel_core.hookspecs import StateDictType
from parallel_core.ranks import broadcast_tensor, rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

__all__ = ["assign", "entry", "is_dtensor", "placed", "shard", "snapshot", "storage", "whole"]


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor."""
    # DTensors take a second to import; where nobody has done so, there are none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def entry(value: Any, state_dict_type: StateDictType) -> Any:
    """Return what stands in a state dict for a value of the model or the optimizer.

    Args:
        value: a tensor, a DTensor, or anything else (`_extra_state`, a step count), which is copied.
        state_dict_type: `sharded` gives the value as it is, detached; `full` a snapshot of it whole, see `snapshot`. A
            sparse tensor (the momentum of an embedding with sparse gradients) comes dense from both.

    Raises:
        StateDictError: a value can't be copied.
    """
    if not isinstance(value, torch.Tensor):
        try:
            return copy.deepcopy(value)
        except Exception as error:  # whatever an object raises that will not be copied: a lock, an open file
            raise StateDictError(
                f"a {type(value).__name__} in the state can't be copied: {type(error).__name__}: {error}; keep plain "
                f"values there"
            ) from error
    if value.layout is not torch.strided:
        value = value.to_dense()
    if state_dict_type is StateDictType.SHARDED:
        return value.detach()
    return snapshot(value.full_tensor() if is_dtensor(value) else value)


def snapshot(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a whole tensor on the CPU with memory of its own, on rank 0; None on the other ranks."""
    if rank() != 0:
        return None
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def shard(tensor: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the DTensor, cut in dimension 0 over `mesh`, of a whole tensor that every rank holds. No communication."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    # A copy: a view would keep the whole tensor alive.
    sharded = distribute_tensor(tensor.detach(), mesh, [Shard(0)], src_data_rank=None)
    return DTensor.from_local(
        sharded.to_local().clone(), mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


@torch.no_grad()
def assign(target: torch.Tensor, value: torch.Tensor, state_dict_type: StateDictType) -> None:
    """Overwrite a tensor of the model with an entry of a state dict, whatever mix of plain tensor and DTensor they are.

    Args:
        target: the tensor to fill: a DTensor, or a plain tensor that holds the whole of the parameter or buffer.
        value: the entry. Under `full`, rank 0's counts and the others' is never read; under `sharded`, each rank's own:
            a DTensor, or a plain tensor that is whole on every rank.
        state_dict_type: which of the two.
    """
    if is_dtensor(target):
        if is_dtensor(value) and value.device_mesh == target.device_mesh:
            target.copy_(value.redistribute(placements=target.placements))
            return
        from torch.distributed.tensor import distribute_tensor

        complete = whole(value, state_dict_type, target.to_local().device)
        own = distribute_tensor(complete, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(own.to_local())
    elif state_dict_type is StateDictType.SHARDED:
        target.copy_(value.full_tensor() if is_dtensor(value) else value)
    else:
        if rank() == 0:
            target.copy_(value)
        broadcast_tensor(target)


@torch.no_grad()
def placed(value: Any, parameter: torch.Tensor, state_dict_type: StateDictType) -> Any:
    """Return an entry of an optimizer's state as the optimizer of this rank holds it.

    Args:
        value: the entry, as `assign` takes it; what is no tensor is returned as it is.
        parameter: the parameter it belongs to. An entry of its shape is laid out as the parameter is, on its device;
            any other tensor is whole on every rank: a DTensor where the parameter is one; otherwise, or where it has
            no dimensions (a step count), on the CPU.
        state_dict_type: `full` or `sharded`.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        complete = whole(value, state_dict_type, torch.device("cpu")).clone()
        return complete if not value.dim() or not is_dtensor(parameter) else _replicated(complete, parameter)
    target = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    assign(target, value, state_dict_type)
    return target


def _replicated(tensor: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return a tensor as the optimizer computes with it: together with gradients, which are DTensors."""
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh
    own = tensor.to(parameter.to_local().device)
    return DTensor.from_local(own, mesh, [Replicate()] * mesh.ndim, run_check=False)


def whole(value: torch.Tensor, state_dict_type: StateDictType, device: torch.device) -> torch.Tensor:
    """Return an entry of a state dict whole, on every rank, on `device`.

    Args:
        value: the entry, as `assign` takes it.
        state_dict_type: `full` or `sharded`.
        device: where to; must be one that the process group serves.
    """
    if state_dict_type is StateDictType.SHARDED:
        return (value.full_tensor() if is_dtensor(value) else value).to(device)
    received = torch.empty(value.shape, dtype=value.dtype, device=device)
    if rank() == 0:
        received.copy_(value)
    broadcast_tensor(received)
    return received


def storage(tensor: torch.Tensor) -> tuple[str, int]:
    """Return what a tensor has in common with its views; of one without memory of its own kind, what nothing has."""
    # A subclass that stands for other tensors (DTensor) dispatches itself, and one that is merely a class does not.
    plain = type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and tensor.layout is torch.strided
    return ("storage", tensor.untyped_storage()._cdata) if plain else ("tensor", id(tensor))
