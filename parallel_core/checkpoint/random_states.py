"""The generators of random numbers of one rank: Python's, NumPy's where it is used, and torch's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from parallel_core.checkpoint.tree import decode, encode
from parallel_core.errors import CheckpointError


def random_state() -> Any:
    """Return the states of this process's generators, as JSON can say them.

    Raises:
        CheckpointError: NumPy's own generator has been exchanged for one of another kind.
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": bytes(torch.get_rng_state().tolist())}
    if (numpy := sys.modules.get("numpy")) is not None:
        state = numpy.random.get_state(legacy=False)
        if (kind := state["bit_generator"]) != "MT19937":
            raise CheckpointError(
                f"random_state: numpy.random has been given a {kind}, and only NumPy's own choice, "
                f"MT19937, can be saved; use a numpy.random.Generator of your own, and save its state as extra"
            )
        keys, position = state["state"]["key"].tolist(), state["state"]["pos"]
        states["numpy"] = (kind, keys, position, state["has_gauss"], state["gauss"])
    if torch.accelerator.is_available():
        states["accelerator"] = bytes(torch.get_device_module().get_rng_state().tolist())
    return encode(states, "the random state")


def restore_random_state(node: Any) -> None:
    """Put the generators of this process into the states that `random_state` returned."""
    states = decode(node)
    random.setstate(states["python"])
    torch.set_rng_state(_tensor(states["torch"]))
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
    if "accelerator" in states and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(_tensor(states["accelerator"]))


def _tensor(state: bytes) -> torch.Tensor:
    return torch.tensor(list(state), dtype=torch.uint8, device="cpu")
