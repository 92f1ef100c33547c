"""What a save was asked for, and whether all ranks were asked for the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from parallel_core import ranks
from parallel_core.alike import layout_differences, raise_differences
from parallel_core.checkpoint.folder import checkpoint_path
from parallel_core.checkpoint.safetensors_format import SIZES
from parallel_core.checkpoint.tensor_bytes import dtype_named
from parallel_core.dtypes import dtype_name
from parallel_core.errors import CheckpointError
from parallel_core.hookspecs import StateDictType
from parallel_core.optimizer_state import optimizer_told
from parallel_core.record import Layout, bare_parameters
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

    def told(self) -> dict[str, Any]:
        """Return it by the names of the arguments, in a form to be compared and read."""
        told = {each.name: getattr(self, each.name) for each in fields(self)}
        return {"path": str(told.pop("place")), **told, "state_dict_type": self.state_dict_type.value}


def checked_options(
    path: str | os.PathLike[str],
    state_dict_type: StateDictType | str,
    dtype: torch.dtype | None,
    max_file_bytes: int | None,
    keep_last: int | None,
    checksum: bool,
    random_state: bool,
) -> Options:
    """Return what `save_checkpoint` was asked for.

    Raises:
        CheckpointError, StateDictError: a value is none that can be asked for.
    """
    kind = parse_state_dict_type(state_dict_type)
    saved_dtype = None if dtype is None else dtype_name(dtype)
    if dtype is not None and not (getattr(dtype, "is_floating_point", False) and saved_dtype in SIZES):
        possible = ", ".join(name for name in SIZES if dtype_named(name).is_floating_point)
        raise CheckpointError(f"dtype: expected a torch.dtype of {possible}, found {dtype!r}")
    for name, value in (("max_file_bytes", max_file_bytes), ("keep_last", keep_last)):
        if value is not None and (type(value) is not int or value < 1):
            raise CheckpointError(f"{name}: expected a whole number from 1 on or None, found {value!r}")
    if max_file_bytes is not None and kind is StateDictType.SHARDED:
        raise CheckpointError("max_file_bytes is for state_dict_type='full'; under 'sharded' each rank has one file")
    return Options(checkpoint_path(path), kind, saved_dtype, max_file_bytes, keep_last, bool(checksum), random_state)


def check_is_model(model: object) -> None:
    """Refuse what is no model.

    Raises:
        CheckpointError: it is none.
    """
    if not isinstance(model, nn.Module):
        raise CheckpointError(f"model: expected a torch.nn.Module, found {type(model).__name__}")


def checked_objects(objects: Any) -> Mapping[str, Any]:
    """Return what was passed as objects.

    Raises:
        CheckpointError: it is no dict by names.
    """
    if not isinstance(objects, Mapping):
        raise CheckpointError(f"objects: expected a dict of objects by name, found {type(objects).__name__}")
    if wrong := [name for name in objects if type(name) is not str]:
        raise CheckpointError(f"objects: expected names that are plain strings, found {wrong[0]!r}")
    return objects


def places_of(optimizer: torch.optim.Optimizer | None, model: nn.Module) -> dict[str, str]:
    """Return in words where an optimizer, if there is one, has the parameters of a model, to be compared by the ranks.

    Raises:
        StateDictError: it holds others.
    """
    if optimizer is None:
        return {}
    told = optimizer_told(optimizer, bare_parameters(model))
    return {name: place for name, place in told.items() if name != "the optimizer"}


def check_alike(what: str, told: dict[str, Any], layout: Layout) -> None:
    """Agree that all ranks were asked for the same; a collective.

    Args:
        what: "save" or "load".
        told: what this rank was asked for, by the names of the arguments.
        layout: the model's.

    Raises:
        CheckpointError: they were not; the same error on every rank.
    """
    with ranks.comparison(CheckpointError) as call:
        call.mine = (told, layout)
    first, _ = call.by_rank[0]
    different = [
        f"{name} is {first[name]!r} on rank 0 and {other[name]!r} on rank {rank}"
        for rank, (other, _) in enumerate(call.by_rank)
        for name in told
        if name in other and other[name] != first[name]
    ]
    if different:
        raise CheckpointError(f"every rank must {what} in the same way: {'; '.join(different[:5])}")
    layouts = [each for _, each in call.by_rank]
    raise_differences(layouts, layout_differences, "pass the same model on every rank", CheckpointError)
