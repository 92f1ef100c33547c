"""Tiny models on which strategies differ, each for a reason, with data and a loss.

Every loss is a mean over the rows of its batch, so that the mean of equal slices' losses is the whole batch's loss, and
averaged gradients are the whole batch's gradients; except for the cases that are not `exact`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel_core.testing.modules import (
    VOCABULARY,
    Adapter,
    Attention,
    Blocks,
    Buffers,
    BuffersOnly,
    Convolutions,
    ExtraState,
    LanguageModel,
    MixedDtypes,
    OwnNames,
    ScalarParameter,
    SharedModule,
    SmallParameters,
    TiedInBlocks,
    UnusedParameter,
)

__all__ = ["CASES", "Case"]


@dataclass(frozen=True)
class Case:
    """A model with its data.

    Attributes:
        name: the key in `CASES`.
        make: builds the model; its values follow torch's generator.
        why: what is special about it.
        shape: of one row of the input and of the target; empty for token ids.
        trains: whether it has anything to train.
        exact: whether ranks must reach the losses of one process; not so where statistics of the batch count, or where
            16 bits round.
        unused: whether a parameter takes no part in the loss.
    """

    name: str
    make: Callable[[], nn.Module]
    why: str
    shape: tuple[int, ...] = (6,)
    trains: bool = True
    exact: bool = True
    unused: bool = False

    def build(self, seed: int = 0) -> nn.Module:
        """Return the model; the same seed gives the same bits, and torch's generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make()

    def batch(self, seed: int, rows: int = 12) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, `rows` in dimension 0; the same seed gives the same bits."""
        generator = torch.Generator().manual_seed(seed)
        if not self.shape:
            ids = torch.randint(VOCABULARY, (rows, 5), generator=generator)
            return ids[:, :-1], ids[:, 1:]
        return torch.randn(rows, *self.shape, generator=generator), torch.randn(rows, *self.shape, generator=generator)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss over the rows."""
        if not self.shape:
            return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())
        return F.mse_loss(output.float(), target)


def _frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).requires_grad_(False)


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))


_CASES = (
    Case("blocks", Blocks, "a list of blocks, which is no module with a forward"),
    Case("language_model", LanguageModel, "an embedding tied to the head", shape=()),
    Case("tied_in_blocks", TiedInBlocks, "a weight in two blocks"),
    Case("shared_module", SharedModule, "one module in two places"),
    Case("small_parameters", SmallParameters, "parameters smaller than the number of ranks"),
    Case("attention", Attention, "an attention that reads its child's weight without calling it", shape=(4, 6)),
    Case("convolutions", Convolutions, "weights of three dimensions", shape=(3, 5)),
    Case("adapter", Adapter, "frozen and trainable parameters in one module"),
    Case("buffers", Buffers, "buffers of integers and of bools, and one that is not saved"),
    Case("extra_state", ExtraState, "state that is no tensor"),
    Case("own_names", OwnNames, "children named like the parts of wrappers"),
    Case("unused_parameter", UnusedParameter, "a parameter without a gradient", unused=True),
    Case("scalar_parameter", ScalarParameter, "a parameter without dimensions"),
    Case("mixed_dtypes", MixedDtypes, "parameters of two dtypes", exact=False),
    Case("batch_norm", _batch_norm, "statistics of the batch", exact=False),
    Case("frozen", _frozen, "nothing to train", trains=False),
    Case("buffers_only", BuffersOnly, "no parameters, but state", trains=False),
    Case("no_state", nn.Tanh, "no parameters and no state", trains=False),
)

#: Every case by its name.
CASES = {case.name: case for case in _CASES}
