"""Where a checkpoint is loaded to: the memory of the model's own shards, or the state-dict hooks of the strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from parallel_core import ranks
from parallel_core.checkpoint.contents import model_shards, shows_pieces
from parallel_core.checkpoint.manifest import SavedTensor, Section
from parallel_core.checkpoint.matching import Match
from parallel_core.checkpoint.optimizer_values import OptimizerValues
from parallel_core.checkpoint.reading import SavedReader
from parallel_core.checkpoint.tensor_bytes import dtype_named
from parallel_core.checkpoint.tree import decode_each
from parallel_core.errors import CheckpointError, ParallelCoreError
from parallel_core.hookspecs import StateDictType
from parallel_core.local_shards import LocalShard, Region
from parallel_core.optimizer_state import load_named_state
from parallel_core.record import Layout, bare_parameters
from parallel_core.strategy import Strategy
from parallel_core.tensors import is_dtensor

BATCH = 256 * 2**20  # bytes of whole tensors that are handed to a strategy's hook at a time


class Targets(Protocol):
    """What a model's and its optimizer's tensors are loaded into. Every method is a collective."""

    def check(self, reader: SavedReader, saved: Section, found: Match) -> None:
        """Make sure that the files have what this rank is going to read; changes nothing."""

    def load_optimizer(
        self, reader: SavedReader, saved: Section, found: Match, optimizer: torch.optim.Optimizer
    ) -> None:
        """Read the optimizer's state and put it in the place of what the optimizer has, which itself is not changed."""

    def load_model(self, reader: SavedReader, saved: Section, found: Match) -> None:
        """Read the model's tensors to where they belong, each from the saved one that was found for it."""


def targets_of(strategy: Strategy, model: nn.Module, layout: Layout) -> Targets:
    """Return where a model is loaded to; a collective."""
    if strategy.has_local_shards:
        return _Shards(model, model_shards(strategy, model, layout))
    return _StateDicts(strategy, model)


def _check(reader: SavedReader, saved: Section, wanted: Mapping[str, tuple[str, Region]]) -> None:
    with ranks.agreement(CheckpointError):
        for source, region in wanted.values():
            reader.check(source, saved.tensors[source], region)


class _Shards:
    """Straight into the shards that the strategy shows: nothing is gathered, and nothing is copied twice."""

    def __init__(self, model: nn.Module, shards: Mapping[str, LocalShard]) -> None:
        self._model = model
        self._shards = shards

    def check(self, reader: SavedReader, saved: Section, found: Match) -> None:
        _check(reader, saved, {name: (source, self._shards[name].region) for name, source in found.sources.items()})

    def load_optimizer(
        self, reader: SavedReader, saved: Section, found: Match, optimizer: torch.optim.Optimizer
    ) -> None:
        parameters = bare_parameters(self._model)
        in_pieces = shows_pieces(parameters, self._shards)

        def tensor_for(name: str, source: str) -> torch.Tensor:
            info = saved.tensors[source]
            dtype = found.state_dtype(name, info)
            target = _state_tensor(name, parameters[name], self._shards[name], info, dtype, in_pieces=in_pieces)
            reader.fill(_state_shard(target, self._shards[name], info), source, info)
            return target

        with ranks.agreement(CheckpointError):
            state, groups = _values(saved, reader, tensor_for)
            with _taken_by(optimizer):
                load_named_state(optimizer, parameters, state, groups)

    def load_model(self, reader: SavedReader, saved: Section, found: Match) -> None:
        with ranks.agreement(CheckpointError):
            for name, source in found.sources.items():
                try:
                    reader.fill(self._shards[name], source, saved.tensors[source])
                except CheckpointError as error:
                    # All that can be known beforehand is known by now: a disk failed, or somebody wrote to the file.
                    raise CheckpointError(f"{error}; the model has some of the checkpoint's values now") from error


class _StateDicts:
    """Through the strategy's own state-dict hooks, with DTensors of which each rank reads its part."""

    def __init__(self, strategy: Strategy, model: nn.Module) -> None:
        self._strategy = strategy
        self._model = model
        device = next((parameter.device.type for parameter in model.parameters()), "cpu")
        self._mesh = None
        if ranks.world_size() > 1:
            from torch.distributed.device_mesh import init_device_mesh

            self._mesh = init_device_mesh(device, (ranks.world_size(),))

    def check(self, reader: SavedReader, saved: Section, found: Match) -> None:
        _check(
            reader,
            saved,
            {name: (each, Region.whole(saved.tensors[each].shape)) for name, each in found.sources.items()},
        )

    def load_optimizer(
        self, reader: SavedReader, saved: Section, found: Match, optimizer: torch.optim.Optimizer
    ) -> None:
        def tensor_for(name: str, source: str) -> torch.Tensor:
            info = saved.tensors[source]
            return self._read(reader, source, info, found.state_dtype(name, info))

        with ranks.agreement(CheckpointError):
            state, groups = _values(saved, reader, tensor_for)
        state_dict = {"state": state, "param_groups": groups}
        # A hook on the optimizer may fail on one rank; what the ranks do together in here comes before that.
        with ranks.agreement(CheckpointError), _taken_by(optimizer):
            self._strategy.load_optimizer_state_dict(self._model, optimizer, state_dict, StateDictType.SHARDED)

    def load_model(self, reader: SavedReader, saved: Section, found: Match) -> None:
        batch: dict[str, Any] = {}
        size = 0
        for name, source in found.sources.items():
            info = saved.tensors[source]
            with ranks.agreement(CheckpointError):
                # In the model's dtype already, so that what that has no room for is found.
                _, dtype = found.converted.get(name, ("", info.dtype))
                batch[name] = self._read(reader, source, info, dtype_named(dtype))
            size += info.nbytes
            if size >= BATCH:
                self._strategy.load_model_state_dict(self._model, batch, StateDictType.SHARDED)
                batch, size = {}, 0
        if batch:
            self._strategy.load_model_state_dict(self._model, batch, StateDictType.SHARDED)

    def _read(self, reader: SavedReader, source: str, info: SavedTensor, dtype: torch.dtype) -> torch.Tensor:
        if self._mesh is None or not info.shape:
            return reader.whole(source, info, dtype)
        from torch.distributed.tensor import Shard, empty

        target = empty(info.shape, dtype=dtype, device_mesh=self._mesh, placements=[Shard(0)])
        reader.fill(LocalShard.of(target), source, info)
        return target


@contextmanager
def _taken_by(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    try:
        yield
    except ParallelCoreError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"the optimizer ({type(optimizer).__name__}) does not take the state that was saved: "
            f"{type(error).__name__}: {error}"
        ) from error


def _values(
    saved: Section, reader: SavedReader, tensor_for: Callable[[str, str], torch.Tensor]
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return an optimizer's saved state and groups, with the tensors of a function for a parameter and a saved name."""
    values = OptimizerValues.of(saved.values)
    state = {name: decode_each(entries, partial(tensor_for, name)) for name, entries in values.state.items()}
    return state, values.groups(lambda source: reader.whole(source, saved.tensors[source]))


def _state_tensor(
    name: str, parameter: torch.Tensor, shard: LocalShard, info: SavedTensor, dtype: torch.dtype, *, in_pieces: bool
) -> torch.Tensor:
    """Return an empty tensor for a part of a parameter's state: laid out as the parameter, if it has its shape.

    Raises:
        CheckpointError: it says something about a whole parameter that this rank has no view of.
    """
    if info.shape == shard.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if is_dtensor(parameter) and info.shape:
        from torch.distributed.tensor import Replicate, empty

        # The optimizer computes with it and with the parameter's gradient, which is a DTensor.
        mesh = parameter.device_mesh
        return empty(info.shape, dtype=dtype, device_mesh=mesh, placements=[Replicate()] * mesh.ndim)
    if info.shape and in_pieces:
        raise CheckpointError(
            f"the optimizer's state for {name!r} has {info}, where the parameter has {list(shard.shape)}: it can't go "
            f"on from that under a strategy that shows it pieces of parameters; use the strategy that saved it"
        )
    return torch.empty(info.shape, dtype=dtype, device="cpu")


def _state_shard(target: torch.Tensor, parameter: LocalShard, info: SavedTensor) -> LocalShard:
    if info.shape == parameter.shape and not is_dtensor(target):
        return replace(parameter, tensor=target)
    return LocalShard.of(target)
