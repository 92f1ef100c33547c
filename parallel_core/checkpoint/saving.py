"""`save_checkpoint`: from what the ranks hold to a folder that is whole or not there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_core import ranks
from parallel_core.answering import settled
from parallel_core.checkpoint import background as in_background
from parallel_core.checkpoint.background import CheckpointSave
from parallel_core.checkpoint.contents import model_part, objects_part, optimizer_part
from parallel_core.checkpoint.job import agreed_job, copied_job, origin_of
from parallel_core.checkpoint.options import check_alike, check_is_model, checked_options, places_of
from parallel_core.checkpoint.publishing import write
from parallel_core.checkpoint.telling import as_checkpoint_error
from parallel_core.checkpoint.tree import encode
from parallel_core.errors import CheckpointError
from parallel_core.filling import check_can_be_read
from parallel_core.hookspecs import StateDictType
from parallel_core.optimizer_state import check_has_names
from parallel_core.record import layout_of
from parallel_core.state_dicts import check_flags


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
        keep_last: after the save, remove the oldest checkpoints of the same parent folder until so many are left. One
            that can't be removed is logged.
        checksum: whether to take the SHA-256 of each file, by which a load finds a changed byte.
        background: return as soon as what is to be saved has been copied, and write while training goes on. The next
            save or load waits for the end, and so does the end of the process group and of the process.

    Returns:
        the save, to wait for where it goes on in the background.

    Raises:
        CheckpointError: it can't be saved; the same error on every rank, and what stood at `path` still does. Where a
            rank is lost at the very end, the new checkpoint may stand there, whole.
    """
    in_background.wait_for_running()
    with ranks.agreement(CheckpointError):
        check_is_model(model)
        _check_is_optimizer(optimizer)
        check_flags(random_state=random_state, checksum=checksum, background=background)
        record, strategy, model = settled(model)
        check_can_be_read(model, record)
        layout = layout_of(model)
        places = places_of(optimizer, model)
        if optimizer is not None:
            check_has_names(optimizer)
        options = checked_options(path, state_dict_type, dtype, max_file_bytes, keep_last, checksum, random_state)
    told = {"strategy": strategy.name, "optimizer": type(optimizer).__name__, "background": background}
    check_alike("save", {**options.told(), **told, **places}, layout)
    with ranks.agreement(CheckpointError):
        parts = {"model": model_part(strategy, model, layout)}
    with ranks.agreement(CheckpointError):
        if optimizer is not None:
            parts["optimizer"] = optimizer_part(strategy, model, optimizer, parts["model"].shards)
        parts["objects"] = objects_part({} if objects is None else objects)
        encoded = None if extra is None else encode(extra, "extra")
    job = agreed_job(
        options, parts, encoded, layout, origin_of(record, strategy.name, optimizer), background=background
    )
    if not background:
        write(job)
        return CheckpointSave(options.place)
    with ranks.agreement(CheckpointError):  # a rank whose memory is too small must not leave the others waiting
        job = copied_job(job)
    return in_background.start(options.place, partial(write, job))


def _check_is_optimizer(optimizer: object) -> None:
    # An optimizer of one's own need not be torch's.
    if optimizer is not None and not (hasattr(optimizer, "state") and hasattr(optimizer, "param_groups")):
        raise CheckpointError(f"optimizer: expected a torch.optim.Optimizer or None, found {type(optimizer).__name__}")
