"""The optimizer's state dicts, gathered and cut parameter by parameter: it lies in pieces as the parameters do.

torch's own `optim_state_dict` is not used: it steps an optimizer that has no state yet.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from parallel_core import StateDictError, StateDictType, ranks, tensors
from parallel_core.optimizer_state import load_named_state, named_groups
from parallel_core.record import bare_parameters, bare_shapes
from parallel_core_fsdp.model_state import mesh_of_all_ranks
from parallel_core_fsdp.pieces import piece_sizes, piece_starts, sharding_group


class Piece(NamedTuple):
    """What one rank has of one value of a parameter's state: a flat tensor's dtype, or the value itself."""

    dtype: torch.dtype | None
    value: Any


def read(model: nn.Module, optimizer: torch.optim.Optimizer, state_dict_type: StateDictType) -> dict[str, Any]:
    """Return the optimizer's state dict; see the hook `optimizer_state_dict`."""
    parameters, shapes = bare_parameters(model), bare_shapes(model)
    sizes = piece_sizes(model)
    state: dict[str, dict[str, Any]] = {}
    mesh_on = functools.cache(mesh_of_all_ranks)
    for name, pieces in _outline(optimizer, parameters).items():
        state[name] = {}
        for key, piece in pieces.items():
            if piece.dtype is None:
                state[name][key] = piece.value
                continue
            local = optimizer.state.get(parameters[name], {}).get(key)
            whole = _joined(
                local, piece.dtype, parameters[name].device, sizes[name], shapes[name], sharding_group(model)
            )
            if state_dict_type is StateDictType.FULL:
                state[name][key] = tensors.snapshot(whole)
            else:
                state[name][key] = tensors.shard(whole, mesh_on(whole.device.type))
    if state_dict_type is StateDictType.FULL and ranks.rank():
        return {}
    return {"state": state, "param_groups": named_groups(optimizer, parameters)}


def load(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], state_dict_type: StateDictType
) -> None:
    """Load an optimizer's state dict; see the hook `load_optimizer_state_dict`."""
    parameters, shapes = bare_parameters(model), bare_shapes(model)
    starts = piece_starts(model)
    state: dict[str, dict[str, Any]] = {}
    for name, values in state_dict["state"].items():
        state[name] = {}
        own = slice(starts[name], starts[name] + parameters[name].numel())
        for key, value in values.items():
            if not isinstance(value, torch.Tensor) or tuple(value.shape) != shapes[name]:
                state[name][key] = tensors.placed(value, parameters[name], state_dict_type)
            else:
                whole = tensors.whole(value, state_dict_type, parameters[name].device)
                # A copy: a view would keep the whole tensor alive.
                state[name][key] = whole.reshape(-1)[own].clone()
    load_named_state(optimizer, parameters, state, state_dict["param_groups"])


def _outline(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> dict[str, dict[str, Piece]]:
    """Return the state's names and keys, the same on every rank; one that holds nothing of a parameter has no state."""
    mine: dict[str, dict[str, Piece]] = {}
    misfits: list[str] = []
    for name, parameter in parameters.items():
        if parameter in optimizer.state:
            for key, value in optimizer.state[parameter].items():
                is_flat = isinstance(value, torch.Tensor) and value.dim() > 0
                if is_flat and value.shape != parameter.shape:
                    misfits.append(f"{key!r} of {name!r}")
                mine.setdefault(name, {})[key] = Piece(value.dtype, None) if is_flat else Piece(None, value)
    with ranks.agreement():
        if misfits:
            raise StateDictError(
                f"the optimizer keeps state that is not shaped like its parameter: {', '.join(misfits)}; fsdp gives it "
                f"flat pieces of parameters, so such state says nothing about the whole; use strategy ddp"
            )
    # A rank that holds nothing of a parameter makes no steps with it: its count of them is what it once loaded.
    stepping = {name for name, parameter in parameters.items() if parameter.numel()}
    gathered = ranks.all_gather((stepping, mine))
    outline = {}
    for name in parameters:
        keys = {rank: sorted(pieces.get(name, ())) for rank, (holds, pieces) in enumerate(gathered) if name in holds}
        first = next(iter(keys), 0)
        for rank, own in keys.items():
            if own != keys[first]:
                raise StateDictError(
                    f"the optimizer's state of {name!r} is {keys[first]} on rank {first}, {own} on rank {rank}, and "
                    f"each has a part of that parameter; take the same steps on every rank"
                )
        found = sorted(
            ((name not in holds, pieces[name]) for holds, pieces in gathered if name in pieces),
            key=lambda idle_and_pieces: idle_and_pieces[0],
        )
        if found:
            outline[name] = found[0][1]
    return outline


def _joined(
    local: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    sizes: list[int],
    shape: tuple[int, ...],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Return the whole of which each rank of a group has a flat piece; a collective.

    `sizes` are the pieces' lengths, in the order of the group's ranks.
    """
    padded = torch.zeros(max(sizes), dtype=dtype, device=device)
    if local is not None:
        padded[: local.numel()].copy_(local)
    rows = [torch.empty_like(padded) for _ in sizes]
    if padded.numel():
        dist.all_gather([ranks.bits(row) for row in rows], ranks.bits(padded), group=group)
    return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)]).view(shape)
