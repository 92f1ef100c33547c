"""Where a model's first values come from: it was built with them, it makes them itself, or a state dict has them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from parallel_core import ranks
from parallel_core.errors import WrapError
from parallel_core.filling import check_no_copies
from parallel_core.hookspecs import StateDictType
from parallel_core.meta import MetaStart
from parallel_core.meta_model import check_start, meta_tensors
from parallel_core.names import bare_modules, uncompiled
from parallel_core.outlines import entries_to_load
from parallel_core.record import Layout, find_record
from parallel_core.state_dicts import check_model_state_dict, named
from parallel_core.strategy import Strategy, bare_model_strategy
from parallel_core.strategy_config import StrategyConfig

# The ways through a model, with the arguments that they are called with.
_WALKS: dict[str, dict[str, bool]] = {
    "named_modules": {"remove_duplicate": False},
    "named_parameters": {"remove_duplicate": False},
    "named_buffers": {"remove_duplicate": False},
    "named_children": {},
    "modules": {},
    "parameters": {},
    "buffers": {},
    "children": {},
}


@dataclass(frozen=True)
class FirstValues:
    """What a training script says about its model's first values; all ranks say the same.

    Attributes:
        loads: whether they come from a state dict: rank 0's.
        state_dict: this rank's; counts on rank 0 alone.
    """

    loads: bool
    state_dict: Mapping[str, Any] | None

    def told(self, model: nn.Module) -> str:
        """Return in words where a bare model's first values come from."""
        if self.loads:
            return "a state dict"
        return "reset_parameters, from the meta device" if meta_tensors(model) else "the model as it was built"

    def check(self, model: nn.Module, layout: Layout) -> None:
        """Agree that every tensor of a bare model, alike on all ranks, is going to have a value. Touches nothing.

        A collective where a state dict, or the meta device, has a part in it.

        Raises:
            WrapError: a tensor on the meta device would be left without one.
            StateDictError: the state dict does not fit the model.
        """
        if meta_tensors(model):
            with ranks.agreement(WrapError):
                check_start(model, layout.entries if self.loads else None)
        if self.loads:
            check_model_state_dict(layout, self.state_dict, StateDictType.FULL, strict=True, cast=False)

    def wrap(
        self, model: nn.Module, layout: Layout, strategy: Strategy, config: StrategyConfig, device: torch.device
    ) -> nn.Module:
        """Return what the strategy makes of a bare model, started from the meta device where it needs that."""
        if not meta_tensors(model):
            return strategy.wrap_model(model, config, device)
        loaded = layout.entries if self.loads else None
        start = MetaStart(model, lambda started: strategy.wrap_model(started, config, device), loaded)
        return strategy.wrap_meta_model(model, config, device, start)

    def load(self, strategy: Strategy, model: nn.Module, layout: Layout) -> None:
        """Load the state dict, if there is one, into a wrapped or bare model; a collective."""
        if self.loads:
            entries = entries_to_load(layout, self.state_dict, StateDictType.FULL, missing=())
            strategy.load_model_state_dict(model, entries, StateDictType.FULL)


def checked_layout(model: nn.Module) -> Layout:
    """Return the layout of a bare model.

    Raises:
        WrapError: it is no module, it is wrapped already, by torch too, its class hides some of its parts, or it has
            parameters or buffers without a shape.
    """
    if not isinstance(model, nn.Module):
        raise WrapError(f"expected a torch.nn.Module to wrap, found {type(model).__name__}")
    record = find_record(model)
    if record is not None:
        raise WrapError(f"this model is wrapped already, by strategy {record.strategy}; wrap the bare model, once")
    _check_not_in_parallel(model)
    _check_shows_all(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lazy = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if lazy:
        raise WrapError(f"{named('not initialized yet', lazy)}; run the bare model once, so that they get their shapes")
    return Layout.of(model)


def _check_not_in_parallel(model: nn.Module) -> None:
    """Refuse a model with a part that torch runs in parallel already: two would reduce its gradients, or name them."""
    kinds: tuple[type, ...] = (DistributedDataParallel, DataParallel)
    # It takes a second to import; where nobody has done so, nothing is sharded.
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        kinds = (*kinds, fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    for _, path, module in bare_modules(model):
        if isinstance(module, kinds):
            where = repr(path.removesuffix(".")) if path else "the model"
            raise WrapError(f"{where} is a {type(module).__name__} already; pass the bare model")


def _check_shows_all(model: nn.Module) -> None:
    """Refuse a model that answers otherwise than torch's own methods do: they are what finds the tensors of a model."""
    model = uncompiled(model)
    for method, options in _WALKS.items():
        if getattr(type(model), method) is getattr(nn.Module, method):
            continue
        there = [*map(_identities, getattr(nn.Module, method)(model, **options))]
        try:
            said = getattr(model, method)(**options)
            is_same = isinstance(said, Iterator) and [*map(_identities, said)] == there
        except Exception:  # whatever an override raises
            is_same = False
        if not is_same:
            raise WrapError(
                f"{type(model).__name__} overrides {method}(), which answers otherwise than torch's own, by which the "
                f"parts of a model are found; give the override another name"
            )


def _identities(found: Any) -> Any:
    return (found[0], id(found[1])) if isinstance(found, tuple) else id(found)


def start_bare(model: nn.Module, device: torch.device, first_values: FirstValues) -> nn.Module | None:
    """Give a model that stays bare its first values, and return it on its device; None if it has them already.

    Raises:
        WrapError, StateDictError: as for `FirstValues.check`.
    """
    if not first_values.loads and not _lacks_values(model):
        return None
    strategy = bare_model_strategy()
    with ranks.agreement(WrapError):
        layout = checked_layout(model)
        check_no_copies(model)
    first_values.check(model, layout)
    with ranks.agreement(WrapError):
        first_values.wrap(model, layout, strategy, strategy.config_class(), device)
    first_values.load(strategy, model, layout)
    return model.to(device)


def _lacks_values(model: object) -> bool:
    # Where nothing is wrapped, nothing is asked of the model either, not even that it is one.
    return isinstance(model, nn.Module) and bool(meta_tensors(model))
