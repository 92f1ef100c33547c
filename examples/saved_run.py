"""A training run on disk: `<run>/step-00000300/`, whole or not there at all.

`model.safetensors` has the weights under the bare model's names, for any tool to open; `optimizer.safetensors` the
optimizer's tensors; `training.json` everything else. None of them can run code when it is read, as a pickle could.

The functions are the same for every strategy, and for one process; each must be called on every rank.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from parallel_core import (
    load_model_state_dict,
    load_optimizer_state_dict,
    model_state_dict,
    optimizer_state_dict,
    ranks,
)

WEIGHTS, OPTIMIZER, TRAINING = "model.safetensors", "optimizer.safetensors", "training.json"


def last_saved(run: Path) -> Path | None:
    """Return the newest folder that `save_run` has made in the run's folder."""
    return max(run.glob("step-*"), default=None)


def save_run(run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> None:
    """Save the run as it is after `step` steps, in place of what was saved before; `more` is what JSON can say."""
    weights = model_state_dict(model)  # whole, on rank 0
    state = optimizer_state_dict(model, optimizer)
    with ranks.agreement():  # if rank 0's disk is full, the others must not wait for it
        if ranks.rank() == 0:
            _write(run, step, weights, state, more)


def load_run(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Load what was saved last, under whatever strategy, and return `step` and what `save_run` was given besides."""
    with ranks.agreement():
        weights, state, training = _read(run) if ranks.rank() == 0 else ({}, {}, {})
    load_model_state_dict(model, weights)
    load_optimizer_state_dict(model, optimizer, state)
    loaded: dict[str, Any] = ranks.broadcast(training)
    return loaded


def _write(run: Path, step: int, weights: dict[str, Any], state: dict[str, Any], more: dict[str, Any]) -> None:
    unfinished, finished = run / "unfinished", run / f"step-{step:08}"
    shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed as it saved
    unfinished.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = {}
    values: dict[str, dict[str, Any]] = {}
    for name, entries in state["state"].items():
        values[name] = {key: value for key, value in entries.items() if not isinstance(value, torch.Tensor)}
        tensors |= {f"{name}/{key}": value for key, value in entries.items() if key not in values[name]}
    save_file(weights, unfinished / WEIGHTS)
    save_file(tensors, unfinished / OPTIMIZER)
    training = {"step": step, **more, "optimizer": {"values": values, "param_groups": state["param_groups"]}}
    (unfinished / TRAINING).write_text(json.dumps(training, indent=2) + "\n")
    for file in unfinished.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())  # a rename may reach the disk before what was written
    older = list(run.glob("step-*"))
    unfinished.rename(finished)
    for folder in older:
        shutil.rmtree(folder)


def _read(run: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    folder = last_saved(run)
    if folder is None:
        raise FileNotFoundError(f"no saved run in {run}")
    training = json.loads((folder / TRAINING).read_text())
    optimizer = training.pop("optimizer")
    state: dict[str, dict[str, Any]] = optimizer["values"]
    for name, tensor in load_file(folder / OPTIMIZER).items():
        parameter, _, key = name.rpartition("/")
        state[parameter][key] = tensor
    return load_file(folder / WEIGHTS), {"state": state, "param_groups": optimizer["param_groups"]}, training
