"""What the clauses run on ranks: a model wrapped, trained for some steps, and looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import parallel_core
from parallel_core import DistributedConfig, ranks
from parallel_core.testing.models import CASES

ROWS = 12  # can be divided among 1, 2, 3, 4 and 6 ranks

KINDS = ("full", "sharded")

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    # All parameters in one operation, as on GPUs by default: many small steps of DTensors are slow.
    return torch.optim.AdamW(parameters, lr=1e-2, foreach=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, foreach=True)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=True)


def for_each(
    cases: Mapping[str, DistributedConfig | None], work: Callable[[str, DistributedConfig | None], Any]
) -> dict[str, Any]:
    """Run `work(case, config)` for every case, one after the other, and return what it returned by case."""
    found = {}
    for case, config in cases.items():
        try:
            found[case] = work(case, config)
        except Exception as error:
            error.add_note(f"in the case {case!r}: {CASES[case].why}")
            raise
    return found


class Run:
    """A case on this rank, under a strategy or, without a config, in one process.

    Attributes:
        model: the wrapped model.
        optimizer: made after the wrap; None where there is nothing to train.
    """

    def __init__(
        self,
        case: str,
        config: DistributedConfig | None,
        *,
        seed: int = 0,
        make_optimizer: MakeOptimizer = adamw,
        change: Callable[[nn.Module], nn.Module] = lambda model: model,
    ) -> None:
        """Build the case's model, change it, and wrap it."""
        self.case = CASES[case]
        self.model = change(self.case.build(seed))
        wrapped = None if config is None else parallel_core.wrap_model_for_training(self.model, config)
        if wrapped is not None:  # not its truth value: a model that was compiled has none
            self.model = wrapped
        self.optimizer = None
        if self.case.trains:
            self.optimizer = parallel_core.wrap_optimizer(self.model, make_optimizer(self.model.parameters()))

    def backward(self, seed: int, *, rows: int = ROWS, model: nn.Module | None = None) -> float:
        """Run forward and backward on this rank's share of a batch; return the share's loss."""
        index, count = parallel_core.data_parallel(self.model)
        own = slice(index * rows // count, (index + 1) * rows // count)
        inputs, targets = self.case.batch(seed, rows)
        loss = self.case.loss((self.model if model is None else model)(inputs[own]), targets[own])
        if self.case.trains:
            loss.backward()
        return loss.item()

    def step(self, seed: int) -> float:
        """Train on this rank's share of a batch; return the share's loss before the step."""
        loss = self.backward(seed)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def train(self, seeds: Iterable[int]) -> list[float]:
        """Train on batches; return the losses of the whole batches."""
        # Gathered once: asking the other ranks after every step would take longer than the steps.
        shares = ranks.all_gather([self.step(seed) for seed in seeds])
        return [sum(losses) / len(losses) for losses in zip(*shares, strict=True)]

    def full(self) -> dict[str, Any]:
        """Return the full state dict: what rank 0 gets."""
        return parallel_core.model_state_dict(self.model)

    def local(self) -> dict[str, Any]:
        """Return copies of what this rank holds, by name."""
        return copied(parallel_core.model_state_dict(self.model, "sharded"))

    def state(self, kind: str = "full") -> dict[str, Any]:
        """Return the state of the model and, where there is one, of the optimizer."""
        found: dict[str, Any] = {"model": parallel_core.model_state_dict(self.model, kind)}
        if self.optimizer is not None:
            found["optimizer"] = parallel_core.optimizer_state_dict(self.model, self.optimizer, kind)
        return found

    def held(self, *, whole_from_rank_0: bool = False) -> dict[str, Any]:
        """Return copies of what this rank holds of the model's and the optimizer's state, by its place in it.

        Args:
            whole_from_rank_0: give rank 0's instead of what each rank has whole, such as statistics of its own batches.
        """
        values = dict(_leaves(self.state("sharded")))
        if whole_from_rank_0:
            whole = {place: value for place, value in values.items() if not isinstance(value, DTensor)}
            values |= ranks.all_gather(whole)[0]
        return copied(values)


def trained_and_reloaded(case: str, config: DistributedConfig | None) -> list[Any]:
    """Train for three steps; under a strategy, save and load state of both kinds.

    Returns:
        The losses; the weights; where they differ after all of that; the optimizer's state after it.
    """
    run = Run(case, config)
    losses = run.train(range(3))
    run.model(run.case.batch(seed=9)[0])  # some ways to shard leave parameters whole after a forward
    assert run.optimizer is not None
    weights = run.full()
    for kind in KINDS if config else ():
        state = parallel_core.optimizer_state_dict(run.model, run.optimizer, kind)
        values = parallel_core.model_state_dict(run.model, kind)
        parallel_core.load_optimizer_state_dict(run.model, run.optimizer, state, kind)
        parallel_core.load_model_state_dict(run.model, values, kind)
    again = parallel_core.optimizer_state_dict(run.model, run.optimizer)
    return [losses, weights, differences(run.full(), weights), again]


def copied(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of plain tensors with memory of their own: the local part of each DTensor."""
    return {name: local(value).clone() if isinstance(value, Tensor) else value for name, value in state_dict.items()}


def _leaves(state: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (place, value) for all that is in a state dict, however deep; what is empty is a value too."""
    if isinstance(state, Mapping) and state:
        for name in sorted(state, key=repr):
            yield from _leaves(state[name], f"{place}[{name!r}]")
    else:
        yield place, state


def cloned(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of the same form with memory of its own."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state_dict.items()}


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def whole(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sharded state dict with every DTensor gathered; a collective."""
    return {
        name: value.full_tensor().detach() if isinstance(value, DTensor) else value
        for name, value in state_dict.items()
    }


def scramble(model: nn.Module) -> None:
    """Overwrite every value that this rank holds, so that what is right afterwards was loaded."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(3)


def differences(found: Any, expected: Any, *, tolerance: float | None = None, where: str = "") -> list[str]:
    """Return where two state dicts differ: in names, order, dtype, shape, or bits (or by more than a tolerance).

    Order counts for the names of a model, not for the entries of one parameter in an optimizer's state.
    """
    if isinstance(expected, Mapping):
        names = list(found) if isinstance(found, Mapping) else found
        in_order = isinstance(found, Mapping) and (names == list(expected) or where.count("[") > 1)
        if not in_order or found.keys() != expected.keys():
            return [f"{where or 'the dict'} has {names!r}, expected {list(expected)}"]
        return [
            line
            for name, value in expected.items()
            for line in differences(found[name], value, tolerance=tolerance, where=f"{where}[{name!r}]")
        ]
    if not isinstance(expected, Tensor):
        return [] if found == expected else [f"{where} is {found!r}, expected {expected!r}"]
    if not isinstance(found, Tensor) or (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return [f"{where} is {kind(found)}, expected {kind(expected)}"]
    if tolerance is None:
        return [] if torch.equal(ranks.bits(found), ranks.bits(expected)) else [f"{where} has other bits than expected"]
    gap = (found.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    return [] if gap <= tolerance else [f"{where} is off by {gap:.3g}, allowed is {tolerance:.3g}"]


def kind(value: object) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def problems(found: list[dict[str, list[str]]]) -> list[str]:
    """Return what any rank found wrong in any case, from the results of `for_each`, by rank."""
    return [
        f"{case}, rank {rank}: {line}" for rank, lines in enumerate(found) for case in lines for line in lines[case]
    ]
