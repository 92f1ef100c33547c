"""parallel_core: train a PyTorch model on many devices with a strategy named in a config file.

A strategy (`ddp`, `fsdp`, or somebody else's) is a plugin, found through an entry point. The training script does not
name it:

    config = load_config("parallel.toml")            # parallel_strategy = "fsdp"
    with process_group(config) as group:             # torchrun's ranks, or just this process
        model = wrap_model_for_training(model, config, device=group.device) or model.to(group.device)
        optimizer = wrap_optimizer(model, torch.optim.AdamW(model.parameters()))
        for inputs, targets in batches:
            loss_of(model(inputs), targets).backward()
            clip_grad_norm(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        weights = model_state_dict(model)            # whole, on rank 0, under the bare model's names

Where to find things:

- `config`, `strategy_config`: the settings, their validation, and where they are read from;
- `training`, `saving`: the verbs above and their siblings; `report`: what a wrap did; `distributed`: the process group;
- `hookspecs`: the contract of a strategy; `defaults`: what the core answers for it;
- `ranks`, `units`, `tensors`, `names`, `record`, `optimizer_state`, `meta`: tools for the authors of strategies;
- `registry`, `binding`, `strategy`: from an entry point to a strategy that can be called.

The names below are imported when they are first used: checking a config must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from parallel_core.checkpoint.background import CheckpointSave
    from parallel_core.checkpoint.listing import latest_checkpoint
    from parallel_core.checkpoint.loading import LoadedCheckpoint, load_checkpoint
    from parallel_core.checkpoint.saving import save_checkpoint
    from parallel_core.config import DistributedConfig, load_config
    from parallel_core.distributed import process_group
    from parallel_core.errors import (
        CheckpointError,
        ConfigError,
        ParallelCoreError,
        ProcessGroupError,
        RankError,
        StateDictError,
        StrategyError,
        TrainingError,
        WrapError,
    )
    from parallel_core.hookspecs import StateDictType, hookimpl
    from parallel_core.report import WrapReport, wrap_report
    from parallel_core.saving import (
        load_model_state_dict,
        load_optimizer_state_dict,
        model_state_dict,
        optimizer_state_dict,
    )
    from parallel_core.state_dicts import IncompatibleKeys
    from parallel_core.strategy import AvailableStrategy, available_strategies
    from parallel_core.strategy_config import StrategyConfig
    from parallel_core.training import (
        clip_grad_norm,
        data_parallel,
        grad_scaler,
        no_sync,
        wrap_model_for_training,
        wrap_optimizer,
    )

__version__ = "0.1.0"

_HOMES = {
    "checkpoint.background": ("CheckpointSave",),
    "checkpoint.listing": ("latest_checkpoint",),
    "checkpoint.loading": ("LoadedCheckpoint", "load_checkpoint"),
    "checkpoint.saving": ("save_checkpoint",),
    "config": ("DistributedConfig", "load_config"),
    "distributed": ("process_group",),
    "errors": (
        "CheckpointError",
        "ConfigError",
        "ParallelCoreError",
        "ProcessGroupError",
        "RankError",
        "StateDictError",
        "StrategyError",
        "TrainingError",
        "WrapError",
    ),
    "hookspecs": ("StateDictType", "hookimpl"),
    "report": ("WrapReport", "wrap_report"),
    "saving": (
        "load_model_state_dict",
        "load_optimizer_state_dict",
        "model_state_dict",
        "optimizer_state_dict",
    ),
    "state_dicts": ("IncompatibleKeys",),
    "strategy": ("AvailableStrategy", "available_strategies"),
    "strategy_config": ("StrategyConfig",),
    "training": (
        "clip_grad_norm",
        "data_parallel",
        "grad_scaler",
        "no_sync",
        "wrap_model_for_training",
        "wrap_optimizer",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022  # in the order of a training script, then of a strategy
    "DistributedConfig",
    "load_config",
    "process_group",
    "wrap_model_for_training",
    "wrap_report",
    "WrapReport",
    "wrap_optimizer",
    "clip_grad_norm",
    "no_sync",
    "grad_scaler",
    "data_parallel",
    "model_state_dict",
    "load_model_state_dict",
    "IncompatibleKeys",
    "optimizer_state_dict",
    "load_optimizer_state_dict",
    "save_checkpoint",
    "CheckpointSave",
    "load_checkpoint",
    "LoadedCheckpoint",
    "latest_checkpoint",
    "StateDictType",
    "StrategyConfig",
    "hookimpl",
    "available_strategies",
    "AvailableStrategy",
    "ParallelCoreError",
    "ConfigError",
    "StrategyError",
    "WrapError",
    "TrainingError",
    "StateDictError",
    "CheckpointError",
    "ProcessGroupError",
    "RankError",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'parallel_core' has no attribute {name!r}")
    # Not kept: DistributedConfig is made anew when the installed strategies change.
    return getattr(importlib.import_module(f"parallel_core.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
