"""`load_checkpoint`: all that can be wrong is found first, on every rank; then each rank reads what belongs to it."""

from __future__ import annotations

import copy
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
from parallel_core.answering import settled
from parallel_core.checkpoint import background
from parallel_core.checkpoint.contents import modules_with_extra_state
from parallel_core.checkpoint.manifest import RANDOM_STATES
from parallel_core.checkpoint.matching import check_optimizer, match
from parallel_core.checkpoint.opening import Saved, check_hashes, check_sizes, open_saved
from parallel_core.checkpoint.options import check_alike
from parallel_core.checkpoint.random_states import restore_random_state
from parallel_core.checkpoint.reading import SavedReader
from parallel_core.checkpoint.targets import targets_of
from parallel_core.checkpoint.telling import as_checkpoint_error
from parallel_core.checkpoint.tree import decode
from parallel_core.errors import CheckpointError
from parallel_core.optimizer_state import required_groups
from parallel_core.record import Layout, bare_parameters


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
        cast: whether weights of another dtype are converted to the model's; otherwise they are an error.
        objects: objects by the names that they were saved under; their `load_state_dict` is called.
        random_state: whether the generators of random numbers get the states that they had on each rank; needs as many
            ranks as saved them.
        verify: whether the files are compared with the hashes that were saved. Their sizes always are.

    Returns:
        the extra data, and the keys that were not loaded.

    Raises:
        CheckpointError: it is damaged, or does not fit; the same error on every rank, and model, optimizer and objects
            are as they were.
    """
    background.wait_for_running()
    record, strategy, model = settled(model)
    layout = Layout.of(model) if record is None else record.layout
    with ranks.agreement(CheckpointError):
        saved = open_saved(path)
        check_sizes(saved)
    # Of the whole manifest: a rank that sees another folder, or sees it at another time, must not load another half.
    digest = hashlib.sha256(msgspec.json.encode(saved.manifest)).hexdigest()
    told: dict[str, Any] = {
        "path": str(saved.place),
        "the SHA-256 of the manifest": digest,
        "optimizer": type(optimizer).__name__,
    }
    told |= {"strict": strict, "cast": cast, "random_state": random_state}
    check_alike("load", told)
    if verify:
        with ranks.agreement(CheckpointError):
            check_hashes(saved, saved.manifest.files[ranks.rank() :: ranks.world_size()])
    with SavedReader(saved) as reader:
        with ranks.agreement(CheckpointError):
            found = match(layout, saved.manifest, reader, strict=strict, cast=cast)
            if optimizer is not None:
                check_optimizer(layout, required_groups(optimizer, bare_parameters(model)), saved.manifest.optimizer)
            states = _object_states(saved, objects or {}, reader)
            generators = _random_state(saved) if random_state else None
            extra = decode(saved.manifest.extra)
            values = saved.manifest.model.values or {}
            extra_states = decode(values, lambda name: reader.whole(name, saved.manifest.model.tensors[name]))
        targets, section = targets_of(strategy, model, layout), saved.manifest.model
        targets.check(reader, section, found.sources)
        put_optimizer = None
        if optimizer is not None:
            assert saved.manifest.optimizer is not None  # check_optimizer has seen it
            put_optimizer = targets.optimizer_load(reader, saved.manifest.optimizer, optimizer)
        with _objects_loaded(objects or {}, states):
            targets.load_model(reader, section, found.sources)
    if put_optimizer is not None:
        put_optimizer()
    with ranks.agreement(CheckpointError):
        for name, module in modules_with_extra_state(model, layout):
            if name in extra_states:
                module.set_extra_state(extra_states[name])
        if generators is not None:
            restore_random_state(generators)
    return LoadedCheckpoint(extra, found.missing, found.unexpected)


@contextmanager
def _objects_loaded(objects: Mapping[str, Any], states: Mapping[str, Any]) -> Iterator[None]:
    """Load objects before the block; if one fails, or the block does, all of them get back what they had.

    Raises:
        CheckpointError: one failed; the same error on every rank.
    """
    with ranks.agreement(CheckpointError):
        before = {name: copy.deepcopy(thing.state_dict()) for name, thing in objects.items()}
    try:
        with ranks.agreement(CheckpointError):
            for name, thing in objects.items():
                if not states[name]:
                    continue  # a gradient scaler that was disabled when it was saved, say; an enabled one refuses it
                try:
                    thing.load_state_dict(states[name])
                except Exception as error:
                    raise CheckpointError(
                        f"objects[{name!r}] ({type(thing).__name__}) does not take the state that was saved: "
                        f"{type(error).__name__}: {error}"
                    ) from error
        yield
    except BaseException:
        for name, thing in objects.items():
            thing.load_state_dict(before[name])
        raise


def _object_states(saved: Saved, objects: Mapping[str, Any], reader: SavedReader) -> dict[str, Any]:
    section = saved.manifest.objects
    there = section.values or {}
    for name, thing in objects.items():
        if name not in there:
            listed = ", ".join(map(repr, there)) or "none"
            raise CheckpointError(f"{saved.place} has no state of objects[{name!r}]; saved are: {listed}")
        if not callable(getattr(thing, "load_state_dict", None)):
            raise CheckpointError(f"objects[{name!r}] has no load_state_dict(): found {type(thing).__name__}")
    return {name: decode(there[name], lambda key: reader.whole(key, section.tensors[key])) for name in objects}


def _random_state(saved: Saved) -> Any:
    """Return what was saved of this rank's generators.

    Raises:
        CheckpointError: nothing was, or by another number of ranks.
    """
    if not saved.manifest.random_states:
        raise CheckpointError(f"{saved.place} was saved without random states; load with random_state=False")
    try:
        states = msgspec.json.decode((saved.folder / RANDOM_STATES).read_bytes(), type=list[Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{saved.folder / RANDOM_STATES} can't be read: {error}") from error
    if len(states) != ranks.world_size():
        raise CheckpointError(
            f"{saved.place} has the random states of {len(states)} ranks, and {ranks.world_size()} are loading; "
            f"load with random_state=False"
        )
    return states[ranks.rank()]
