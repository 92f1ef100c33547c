"""`load_checkpoint`: all that can be wrong is found first, on every rank; then each rank reads what belongs to it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from parallel_core import ranks
from parallel_core.answering import answering
from parallel_core.checkpoint import background, random_states
from parallel_core.checkpoint.contents import modules_with_extra_state
from parallel_core.checkpoint.manifest import RANDOM_STATES
from parallel_core.checkpoint.matching import check_optimizer, match
from parallel_core.checkpoint.objects import object_states, objects_loaded
from parallel_core.checkpoint.opening import Saved, check_hashes, check_sizes, open_saved
from parallel_core.checkpoint.options import check_alike, check_is_model, checked_objects, places_of
from parallel_core.checkpoint.reading import SavedReader
from parallel_core.checkpoint.targets import targets_of
from parallel_core.checkpoint.telling import as_checkpoint_error
from parallel_core.checkpoint.tree import decode, decode_each
from parallel_core.checkpoint.untrusted import parsed, read_file
from parallel_core.errors import CheckpointError
from parallel_core.filling import check_can_be_filled
from parallel_core.optimizer_state_dicts import Wanted
from parallel_core.record import Layout, bare_parameters, layout_of
from parallel_core.state_dicts import check_flags


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What `load_checkpoint` restored besides.

    Attributes:
        extra: what `save_checkpoint` was given as `extra`; None for weights from elsewhere.
        missing_keys: names of the model that the checkpoint lacks, which kept their values.
        unexpected_keys: names of the checkpoint that the model lacks.
    """

    extra: Any
    missing_keys: list[str]
    unexpected_keys: list[str]


@as_checkpoint_error()
def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    strict: bool = True,
    cast: bool = False,
    objects: Mapping[str, Any] | None = None,
    random_state: bool = False,
    verify: bool = True,
) -> LoadedCheckpoint:
    """Load a checkpoint into the model and its optimizer, in place, whatever strategy and world size it was saved with.

    Call it on every rank. Each rank reads the elements that belong to it, straight to where they belong.

    Args:
        path: a checkpoint's folder; or weights from elsewhere, as a `.safetensors` file or a folder with such files.
        model: the model, wrapped or bare.
        optimizer: an optimizer of the kind that was saved, with the same parameter groups.
        strict: whether missing and unexpected keys of the model are an error.
        cast: whether weights of another dtype are converted to the model's, both of floating point or both complex, and
            with them the optimizer's state that had their dtype; otherwise they are an error.
        objects: objects by the names that they were saved under; their `load_state_dict` is called. Where their own
            state has DTensors, it gets DTensors.
        random_state: whether the generators of random numbers get the states that they had on each rank; needs as many
            ranks as saved them.
        verify: whether the files are compared with the hashes that were saved. Their sizes always are.

    Returns:
        the extra data, and the keys that were not loaded.

    Raises:
        CheckpointError: it is damaged, or does not fit; the same error on every rank, and model, optimizer and objects
            are as they were. Where the model is not, because a disk or a module's `set_extra_state` has failed, or a
            number has no place in its dtype, the message says so.
        WrapError: the model is the module inside of a wrapped one.
    """
    background.wait_for_running()
    with ranks.agreement(CheckpointError):
        check_is_model(model)
        check_flags(strict=strict, cast=cast, random_state=random_state, verify=verify)
        record, strategy, model = answering(model)
        layout = layout_of(model)
        check_can_be_filled(model, record)
        objects = dict(sorted(checked_objects(objects or {}).items()))
        saved = open_saved(path)
        check_sizes(saved)
        told = {
            "path": str(saved.place),
            # Of the whole manifest: a rank that sees another folder, or sees it at another time, must not load another
            # half.
            "the SHA-256 of the manifest": hashlib.sha256(msgspec.json.encode(saved.manifest)).hexdigest(),
            "strategy": strategy.name,
            "optimizer": type(optimizer).__name__,
            "objects": list(objects),
            "strict": strict,
            "cast": cast,
            "random_state": random_state,
            "verify": verify,
        } | places_of(optimizer, model)
    check_alike("load", told, layout)
    if record is not None:
        strategy.settle(model)
    if verify:
        with ranks.agreement(CheckpointError):
            check_hashes(saved, saved.manifest.files[ranks.rank() :: ranks.world_size()])
    with SavedReader(saved) as reader:
        with ranks.agreement(CheckpointError):
            found = match(layout, saved, reader, strict=strict, cast=cast)
            if optimizer is not None:
                check_optimizer(Wanted(layout, optimizer, bare_parameters(model)), saved)
            generators = _random_state(saved) if random_state else None
            extra = decode(saved.manifest.extra)
            tensors = saved.manifest.model.tensors
            extra_states = decode_each(saved.manifest.model.values, lambda name: reader.whole(name, tensors[name]))
        with ranks.agreement(CheckpointError):  # apart, as an object's state_dict() may be a collective
            states = object_states(saved, objects, reader)
        targets, section = targets_of(strategy, model, layout), saved.manifest.model
        targets.check(reader, section, found)
        with _optimizer_kept(optimizer):
            if optimizer is not None and saved.manifest.optimizer is not None:  # check_optimizer has seen it
                targets.load_optimizer(reader, saved.manifest.optimizer, found, optimizer)
            with objects_loaded(objects, states):
                targets.load_model(reader, section, found)
                with ranks.agreement(CheckpointError):
                    _load_extra_states(model, layout, extra_states)
                    if generators is not None:
                        random_states.restore_random_state(generators)
    return LoadedCheckpoint(extra, found.missing, found.unexpected)


@contextmanager
def _optimizer_kept(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """Give an optimizer back what it had, if the block fails: a load puts others in the place of these."""
    before = None if optimizer is None else (optimizer.state, optimizer.param_groups)
    try:
        yield
    except BaseException:
        if optimizer is not None and before is not None:
            optimizer.state, optimizer.param_groups = before
        raise


def _load_extra_states(model: nn.Module, layout: Layout, states: Mapping[str, Any]) -> None:
    for name, module in modules_with_extra_state(model, layout):
        if name in states:
            try:
                module.set_extra_state(states[name])
            except Exception as error:
                raise CheckpointError(
                    f"{name!r}: {type(module).__name__} does not take the extra state that was saved: "
                    f"{type(error).__name__}: {error}; the model has the checkpoint's weights now"
                ) from error


def _random_state(saved: Saved) -> Any:
    """Return what was saved of this rank's generators; changes nothing.

    Raises:
        CheckpointError: nothing was, or by another number of ranks, or they don't take it.
    """
    if not saved.manifest.random_states:
        raise CheckpointError(f"{saved.place} was saved without random states; load with random_state=False")
    path = saved.folder / RANDOM_STATES
    states = parsed(read_file(path), list[Any], f"{path} can't be read")
    if len(states) != ranks.world_size():
        raise CheckpointError(
            f"{saved.place} has the random states of {len(states)} ranks, and {ranks.world_size()} are loading; "
            f"load with random_state=False"
        )
    mine, now = states[ranks.rank()], random_states.random_state()
    try:
        random_states.restore_random_state(mine)
    except Exception as error:
        raise CheckpointError(f"{path} has no state of generators: {type(error).__name__}: {error}") from error
    finally:
        random_states.restore_random_state(now)
    return mine
