"""What one rank has to save: its shards of the model's and the optimizer's tensors, and all that is no tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from parallel_core import ranks
from parallel_core.checkpoint.options import checked_objects
from parallel_core.checkpoint.tree import Keep, encode
from parallel_core.errors import CheckpointError, StrategyError
from parallel_core.hookspecs import StateDictType
from parallel_core.local_shards import LocalShard, Region
from parallel_core.optimizer_state import named_groups
from parallel_core.record import Layout, bare_parameters, has_extra_state
from parallel_core.state_dicts import named
from parallel_core.strategy import Strategy
from parallel_core.tensors import is_dtensor


@dataclass
class Part:
    """What a rank holds of the model, of the optimizer, or of the other objects.

    Attributes:
        shards: this rank's shards of the tensors, by name. A rank may have none of a tensor.
        values: everything that is no tensor, as `parallel_core.checkpoint.tree` has it.
    """

    shards: dict[str, LocalShard] = field(default_factory=dict)
    values: Any = None

    def keeper(self, name: str, shard_of: Callable[[torch.Tensor], LocalShard] = LocalShard.of) -> Keep:
        """Return what takes in tensors under a name; where several come, the later ones get numbers."""

        def keep(_where: str, tensor: torch.Tensor) -> str:
            unique, count = name, 0
            while unique in self.shards:
                unique, count = f"{name}/{count}", count + 1
            self.shards[unique] = shard_of(tensor)
            return unique

        return keep


def model_shards(strategy: Strategy, model: nn.Module, layout: Layout) -> dict[str, LocalShard]:
    """Return this rank's shard of each of the model's tensors, as memory of the model; a collective.

    Raises:
        StrategyError: the strategy has other names than the bare model.
    """
    shards = strategy.local_shards(model)
    expected = [name for name, spec in layout.entries.items() if spec is not None]
    if missing := [name for name in expected if name not in shards]:
        raise StrategyError(
            f"strategy {strategy}: hook local_shards returned no shard for {named('some names', missing)}; this is "
            f"a bug in {strategy.distribution}"
        )
    return {name: shards[name] for name in expected}


def model_part(strategy: Strategy, model: nn.Module, layout: Layout) -> Part:
    """Return what this rank holds of the model; a tied tensor under the first of its names. A collective.

    Raises:
        CheckpointError: there is something in it that can't be saved without pickle.
    """
    again = {name for group in layout.tied for name in group[1:]}
    if strategy.has_local_shards:
        extra = {
            name: _made(module.get_extra_state, f"{name!r}: get_extra_state() of {type(module).__name__}")
            for name, module in modules_with_extra_state(model, layout)
        }
        shards: Mapping[str, LocalShard] = model_shards(strategy, model, layout)
    else:
        entries = strategy.model_state_dict(model, StateDictType.SHARDED)
        shards = {name: LocalShard.of(entries[name]) for name, spec in layout.entries.items() if spec is not None}
        extra = {name: entries[name] for name, spec in layout.entries.items() if spec is None}
    part = Part({name: shard for name, shard in shards.items() if name not in again})
    part.values = {name: encode(value, repr(name), part.keeper(name)) for name, value in extra.items()}
    return part


def _made(make: Callable[[], Any], what: str) -> Any:
    try:
        return make()
    except Exception as error:  # it is the user's own
        raise CheckpointError(f"{what} failed: {type(error).__name__}: {error}") from error


def modules_with_extra_state(model: nn.Module, layout: Layout) -> list[tuple[str, nn.Module]]:
    """Return the modules that have extra state, by its names in the bare model's state dict.

    Raises:
        CheckpointError: something else than a module has put a value that is no tensor into the state dict.
    """

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        # As often as it stands in the model, and in the state dict's order, whatever wrappers are around it.
        if has_extra_state(module):
            yield module
        for child in module._modules.values():
            if child is not None:
                yield from walk(child)

    names = [name for name, spec in layout.entries.items() if spec is None]
    found = list(walk(model))
    if len(found) != len(names):
        raise CheckpointError(
            f"{named('no tensors, and no extra states of modules', names)}; a checkpoint has no place for these: let a "
            f"module return them from get_extra_state"
        )
    return list(zip(names, found, strict=True))


def optimizer_part(
    strategy: Strategy, model: nn.Module, optimizer: torch.optim.Optimizer, shards: Mapping[str, LocalShard]
) -> Part:
    """Return what this rank holds of an optimizer's state, by parameter name; a collective. Changes nothing.

    Args:
        strategy: the model's.
        model: the model.
        optimizer: its optimizer.
        shards: the model's own shards.

    Raises:
        CheckpointError: some of it can't be saved without pickle, or says nothing about a whole parameter.
        StateDictError: the optimizer has parameters that are not the model's.
    """
    part = Part()
    if not strategy.has_local_shards:
        state_dict = strategy.optimizer_state_dict(model, optimizer, StateDictType.SHARDED)
        _take(part, state_dict["state"], state_dict["param_groups"], lambda _, tensor: LocalShard.of(tensor))
        return part
    parameters = bare_parameters(model)
    if lacking := [name for name, each in parameters.items() if each in optimizer.state and name not in shards]:
        raise CheckpointError(
            f"{named('the optimizer has state of parameters that the state dict of the model leaves out', lacking)}; "
            f"let the hook, or the override of state_dict, leave them there"
        )
    in_pieces = shows_pieces(parameters, shards)
    # A rank that holds nothing of a parameter takes no steps with it: what it once loaded is out of date.
    held = {
        name: dict(optimizer.state[parameter])
        for name, parameter in parameters.items()
        if parameter in optimizer.state and (shards[name].region.numel or not math.prod(shards[name].shape))
    }

    def shard_of(name: str, tensor: torch.Tensor) -> LocalShard:
        return state_shard(name, shards[name], tensor, in_pieces=in_pieces)

    _take(part, held, named_groups(optimizer, parameters), shard_of)
    return part


def shows_pieces(parameters: Mapping[str, torch.Tensor], shards: Mapping[str, LocalShard]) -> bool:
    """Tell whether a strategy shows the optimizer plain tensors that are pieces of parameters; a collective.

    One rank may have some of the parameters, or all of them, whole by chance.
    """
    mine = any(
        not is_dtensor(parameter) and shards[name].region != Region.whole(shards[name].shape)
        for name, parameter in parameters.items()
        if name in shards  # a state dict's hook may leave out what is not trained
    )
    return any(ranks.all_gather(mine))


def state_shard(name: str, parameter: LocalShard, tensor: torch.Tensor, *, in_pieces: bool) -> LocalShard:
    """Return the shard that a tensor of an optimizer's state for a parameter is.

    Args:
        name: the parameter's.
        parameter: this rank's shard of it.
        tensor: the tensor. One of the parameter's own shape lies as the parameter does; any other is whole.
        in_pieces: what `shows_pieces` tells.

    Raises:
        CheckpointError: it is neither.
    """
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()  # as the verbs on state give it
    if not is_dtensor(tensor) and tensor.shape == parameter.tensor.shape:
        return replace(parameter, tensor=tensor.detach())
    if is_dtensor(tensor) or tensor.dim() == 0 or not in_pieces:
        return LocalShard.of(tensor, alike=parameter.alike)
    raise CheckpointError(
        f"the optimizer's state for {name!r} has a tensor of shape {list(tensor.shape)}, where this rank's part of the "
        f"parameter has {list(parameter.tensor.shape)}: it says nothing about the whole parameter; use another "
        f"strategy for this optimizer (ddp)"
    )


def objects_part(objects: Mapping[str, Any]) -> Part:
    """Return the states of other objects, by the names that the caller gave them.

    Raises:
        CheckpointError: they are no dict by names, one has no `state_dict`, or there is something in it that can't be
            saved without pickle.
    """
    part = Part(values={})
    for name, thing in sorted(checked_objects(objects).items()):
        encode(name, "the name of an object")
        if not callable(getattr(thing, "state_dict", None)):
            raise CheckpointError(f"objects[{name!r}] has no state_dict(): found {type(thing).__name__}")
        where = f"objects[{name!r}].state_dict()"
        part.values[name] = encode(_made(thing.state_dict, where), where, part.keeper(name))
    return part


def _take(
    part: Part,
    state: Mapping[str, Mapping[str, Any]],
    groups: Any,
    shard_of: Callable[[str, torch.Tensor], LocalShard],
) -> None:
    """Take in an optimizer's state dict."""
    values: dict[str, dict[str, Any]] = {}
    for name, entries in state.items():
        if wrong := [key for key in entries if type(key) is not str]:
            raise CheckpointError(
                f"the optimizer's state for {name!r} has the key {wrong[0]!r}; expected plain strings"
            )
        for key in entries:
            encode(key, f"a key of the optimizer's state for {name!r}")
        values[name] = {
            key: encode(
                value,
                f"the optimizer's state for {name!r}, {key!r}",
                part.keeper(f"{name}/{key}", partial(shard_of, name)),
            )
            for key, value in entries.items()
        }
    part.values = {"state": values, "param_groups": encode(groups, "param_groups", part.keeper("param_groups"))}
