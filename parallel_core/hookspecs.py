"""The contract between parallel_core and a strategy: the markers, the entry-point group and every hook.

A strategy is a module (or an object) that implements some of these hooks with `@hookimpl` and is registered under its
name in the entry-point group `parallel_core.strategies`. `strategy_config` and `wrap_model` are required; a hook that
is left out is answered by `parallel_core.defaults`. An implementation may take fewer arguments than the specification
and none that the specification lacks.

Unless a hook says otherwise it is called on every rank at the same point of the program, and `model` is the module
that the wrap returned, never the wrapper of `torch.compile` around it. What `check_model` or one of the two wraps
raises on one rank is raised on every rank. Any hook that fails must do so before it takes part in a collective, or on
all ranks alike: nobody can tell the others while they wait in one.
"""

# mypy: disable-error-code="empty-body"
# A specification is a signature and its contract; it has no body.

from __future__ import annotations

from contextlib import AbstractContextManager
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallel_core.local_shards import LocalShard
    from parallel_core.meta import MetaStart
    from parallel_core.strategy_config import StrategyConfig
    from parallel_core.units import Unit

ENTRY_POINT_GROUP = "parallel_core.strategies"

hookspec = pluggy.HookspecMarker("parallel_core")
hookimpl = pluggy.HookimplMarker("parallel_core")

REQUIRED_HOOKS = ("strategy_config", "wrap_model")


class StateDictType(StrEnum):
    """Which form a state dict has: `full` (whole, on rank 0) or `sharded` (every rank its own part)."""

    FULL = "full"
    SHARDED = "sharded"


@hookspec(firstresult=True)
def strategy_config() -> type[StrategyConfig]:
    """Return the struct class that holds this strategy's settings.

    When: as the strategy is loaded, in any process, without ranks and without torch imported.
    Must: return a subclass of `parallel_core.StrategyConfig`; give every field a default and a hashable type.
    Must not: import torch, read files or look at the machine.
    """


@hookspec(firstresult=True)
def applies(world_size: int, device: torch.device) -> bool:
    """Say whether there is anything for this strategy to do.

    When: first thing in `wrap_model_for_training`; with no process group as well, then `world_size` is 1.
    Must: answer the same on every rank, from the arguments alone.
    Returns: False to decline, and then `wrap_model_for_training` returns None. Default: `world_size > 1`.
    """


@hookspec(firstresult=True)
def plan_units(model: nn.Module, config: StrategyConfig) -> list[Unit]:
    """Return the units that `wrap_model` would make of the bare model.

    When: to plan, in one process, and before `wrap_model`; the model may be on the meta device.
    Must: return them in the order of the model's modules, each parameter in at most one; what stays is the root's.
    Must not: touch a device, a process group or the model.
    Returns: a list of `parallel_core.units.Unit`; empty, as by default, for a strategy that keeps the model whole.
    """


@hookspec(firstresult=True)
def check_model(model: nn.Module, config: StrategyConfig, device: torch.device) -> list[str]:
    """Return what keeps this strategy from wrapping the bare model as the config asks, a sentence each.

    When: before a wrap; what any rank returns becomes one `WrapError` on every rank, with nothing touched yet. The
    model may be on the meta device.
    Must: find everything that would make `wrap_model`, or the first step, fail: devices, dtypes, shapes, settings.
    Must not: change the model or call a collective.
    Returns: an empty list where nothing is wrong, which is the default.
    """


@hookspec(firstresult=True)
def wrap_model(model: nn.Module, config: StrategyConfig, device: torch.device) -> nn.Module:
    """Return the model made ready to train on all ranks.

    When: in `wrap_model_for_training`, after every rank has agreed that names, shapes and dtypes are the same and that
    `check_model` found nothing. The parameters still lie where the user built them, and none is on the meta device;
    `device` is this rank's own.
    Must: leave the parameters of all ranks equal to each other (broadcast rank 0's, or compare); make the gradients of
    a backward pass the mean over the data-parallel ranks; keep the bare model's names.
    Must not: decline (that is `applies`) or fail for a reason that `check_model` could have found.
    Returns: an `nn.Module`, a new one or the same.
    """


@hookspec(firstresult=True)
def wrap_meta_model(model: nn.Module, config: StrategyConfig, device: torch.device, start: MetaStart) -> nn.Module:
    """Return the model made ready to train on all ranks, from one that has tensors on the meta device.

    When: in place of `wrap_model`, for such a model, after the same agreement; every tensor is known to get a value.
    Must: call `start.materialise` for the model, once, and do what `wrap_model` must. With `start.loads` a state dict
    is loaded right after the wrap, and the values to compare or broadcast are only those that it lacks.
    Must not: hold the whole model on a rank, if the strategy shards: `start.materialise` hands over each part as soon
    as it is finished. Resetting modules in another order would give another model for the same seed.
    Returns: as `wrap_model` does. Default: the whole model is made on the CPU, and handed to `wrap_model`.
    """


@hookspec(firstresult=True)
def wrap_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, config: StrategyConfig) -> torch.optim.Optimizer:
    """Return the optimizer to train with.

    When: in `wrap_optimizer`, which has made sure that the optimizer was made after the wrap, from this model.
    Returns: an optimizer with the same parameters; by default the same optimizer.
    """


@hookspec(firstresult=True)
def settle(model: nn.Module) -> None:
    """Make `model.parameters()` what it is between two steps: what the optimizer holds and a state dict reads.

    When: before a verb looks at parameters, gradients or the optimizer, and before each step of an optimizer that went
    through `wrap_optimizer`; a forward without a backward may have gone before, and have left something gathered.
    Must: be cheap where there is nothing to do; leave a backward that is still to come as it would have been.
    Returns: nothing. Default: does nothing.
    """


@hookspec(firstresult=True)
def model_state_dict(model: nn.Module, state_dict_type: StateDictType) -> dict[str, Any]:
    """Return the model's parameters and persistent buffers under the bare model's names.

    Must: for `full` return every tensor whole, on the CPU, in the dtype it is trained in, as a snapshot, on rank 0, and
    `{}` elsewhere; for `sharded` return on every rank the same keys, what is sharded as DTensor; contain all names of
    a tied parameter. The verb puts the keys into the bare model's order.
    Must not: change the model, or hold more than one unit whole on a rank other than 0.
    """


@hookspec(firstresult=True)
def load_model_state_dict(model: nn.Module, state_dict: dict[str, Any], state_dict_type: StateDictType) -> None:
    """Load a state dict into the model, in place.

    When: after the verb has checked keys, shapes and dtypes and all ranks have agreed that they fit. `state_dict` is
    a dict of the verb's own, in the model's order, and holds the entries to load and no others. Under `full` rank 0's
    has the tensors (on any device) and the other ranks' has the same keys, with meta tensors of the same shapes and
    dtypes. Under `sharded` an entry is a DTensor, or a plain tensor that is whole on every rank. Where the user asked
    for a cast, a dtype may differ from the model's; `copy_` converts it.
    Must: load every entry, converting DTensors where the model has none, and the other way round.
    """


@hookspec(firstresult=True)
def optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict_type: StateDictType
) -> dict[str, Any]:
    """Return the optimizer's state under the bare model's parameter names.

    Must: return `{"state": {name: {key: value}}, "param_groups": [{"params": [name, ...], option: value, ...}]}`; hold
    to the rules of `model_state_dict` for `full` and `sharded`; name a tied parameter by the first of its names.
    Must not: step the optimizer, or make or change any state.
    """


@hookspec(firstresult=True)
def load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], state_dict_type: StateDictType
) -> None:
    """Replace the optimizer's state and its groups' options.

    When: after the verb has checked names and shapes and all ranks have agreed. `state_dict` is as
    `load_model_state_dict` has it: the same structure on every rank, meta tensors off rank 0 under `full`.
    """


@hookspec(firstresult=True)
def local_shards(model: nn.Module) -> dict[str, LocalShard]:
    """Return what this rank holds of each parameter and persistent buffer, as memory to read from and to write to.

    When: to save or load a checkpoint, between two steps. The optimizer's state for a parameter is taken to lie as the
    parameter does.
    Must: return an entry for every name of the bare model's state dict but extra states, a tied parameter's under each
    of its names; every element of a tensor must be on some rank; say `alike` of a shard only where every rank that has
    the same part has the same values: what is saved then is taken from any of them, and from the lowest otherwise.
    Must not: gather tensors or copy them: what is written to a shard has to reach the model.
    Returns: a dict of `parallel_core.local_shards.LocalShard`. By default plain tensors are whole, and DTensors are in
    shards. A strategy that answers a state-dict hook and leaves this one out is saved and loaded through the
    state-dict hooks, under `sharded`.
    """


@hookspec(firstresult=True)
def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale the gradients so that their norm over the whole model is at most `max_norm`.

    Must: compute the norm over all parameters of the bare model, not over this rank's shards.
    Returns: the norm before clipping, a plain tensor (not a DTensor) of no dimensions, the same on every rank.
    """


@hookspec(firstresult=True)
def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context manager under which backward passes accumulate gradients without communication.

    When: their forward passes are under it too. Must: make the next backward pass outside of it complete the mean over
    ranks of the sum; restore what it changed after an exception too. Returns: by default a context manager that does
    nothing.
    """


@hookspec(firstresult=True)
def has_unsynchronised_gradients(model: nn.Module) -> bool:
    """Return whether a backward pass under `no_sync` is still waiting for the one that communicates.

    When: before gradients are clipped and before each step, where True is a `TrainingError`; so it must be cheap.
    Must: answer alike on every rank, as ranks that run alike do; forget what was zeroed. Must not: communicate.
    Returns: by default False.
    """


@hookspec(firstresult=True)
def grad_scaler(model: nn.Module) -> torch.amp.GradScaler:
    """Return the gradient scaler to train with: enabled for fp16, disabled where none is needed.

    Must: make every rank skip a step that one rank has to skip. Default: a disabled `torch.amp.GradScaler`.
    """


@hookspec(firstresult=True)
def data_parallel(model: nn.Module) -> tuple[int, int]:
    """Return `(index, count)`: this rank reads share `index` of the data cut into `count`.

    Ranks with the same index must be fed the same data. Default: rank and world size.
    """
