"""A strategy: one plugin, bound; one typed method for each hook.

The rest of the package talks to strategies through these methods alone. Each answers through pluggy and checks what
comes back, so that a strategy which breaks the contract is named, and not whatever stumbles over its answer later.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parallel_core.answers import CheckedAnswers
from parallel_core.binding import bind
from parallel_core.errors import ParallelCoreError, StrategyError, WrapError
from parallel_core.hookspecs import ENTRY_POINT_GROUP, StateDictType, hookimpl
from parallel_core.registry import Registration, find_registration, load_plugin, registrations
from parallel_core.strategy_config import StrategyConfig, config_class_problems

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallel_core.local_shards import LocalShard
    from parallel_core.meta import MetaStart
    from parallel_core.units import Unit

STATE_DICT_HOOKS = ("model_state_dict", "load_model_state_dict", "optimizer_state_dict", "load_optimizer_state_dict")


@dataclass(frozen=True)
class AvailableStrategy:
    """An installed strategy, as `available_strategies` lists it; `error` is what naming it raises, or None."""

    name: str
    distribution: str
    version: str
    error: StrategyError | None = None


@functools.cache
def bound_strategy(name: str) -> Strategy:
    """Return the installed strategy of this name, imported and checked.

    Raises:
        StrategyError: it is unknown, claimed more than once, fails to import, or breaks the contract.
    """
    registration = find_registration(name)
    return Strategy(registration, load_plugin(registration))


def available_strategies() -> tuple[AvailableStrategy, ...]:
    """Return every installed strategy, sorted by name, with the error of each that can't be used."""
    found = []
    for name, claims in registrations().items():
        try:
            bound_strategy(name)
            error = None
        except StrategyError as problem:
            error = problem
        found += [AvailableStrategy(name, claim.distribution, claim.version, error) for claim in claims]
    return tuple(found)


class _BareModel:
    """The plugin of a model that no strategy has wrapped: everything is left to the defaults."""

    @hookimpl
    def strategy_config(self) -> type[StrategyConfig]:
        return StrategyConfig

    @hookimpl
    def wrap_model(self, model: nn.Module) -> nn.Module:
        return model


@functools.cache
def bare_model_strategy() -> Strategy:
    """Return what answers the verbs for a bare model."""
    entry_point = importlib.metadata.EntryPoint("bare", "parallel_core.defaults", ENTRY_POINT_GROUP)
    return Strategy(Registration("bare", "parallel-core", "", entry_point), _BareModel())


class Strategy(CheckedAnswers):
    """One bound plugin."""

    def __init__(self, registration: Registration, plugin: object) -> None:
        self._registration = registration
        self._hooks = bind(registration, plugin)
        self.name = registration.name
        self.distribution = registration.distribution
        self.version = registration.version
        try:
            found = self._hooks.strategy_config()
        except Exception as error:
            raise StrategyError(
                f"strategy {registration}: hook strategy_config failed: {type(error).__name__}: {error}"
            ) from error
        problems = config_class_problems(found, strategy_name=self.name)
        if problems:
            raise StrategyError(f"strategy {registration}: hook strategy_config: {'; '.join(problems)}")
        self.config_class: type[StrategyConfig] = found

    def __str__(self) -> str:
        return str(self._registration)

    def __repr__(self) -> str:
        return f"<Strategy {self}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # A plugin manager holds modules, which don't pickle; the name finds the same strategy again.
        return bound_strategy, (self.name,)

    def applies(self, world_size: int, device: torch.device) -> bool:
        with self._failing_to("say whether it applies"):
            answer = self._hooks.applies(world_size=world_size, device=device)
        return self._expect(bool, "applies", answer)

    def plan_units(self, model: nn.Module, config: StrategyConfig) -> list[Unit]:
        from parallel_core.units import Unit

        with self._failing_to("plan its units"):
            answer = self._hooks.plan_units(model=model, config=config)
        return self._expect_list(Unit, "plan_units", answer)

    def check_model(self, model: nn.Module, config: StrategyConfig, device: torch.device) -> list[str]:
        with self._failing_to("check the model"):
            answer = self._hooks.check_model(model=model, config=config, device=device)
        return self._expect_list(str, "check_model", answer)

    def wrap_model(self, model: nn.Module, config: StrategyConfig, device: torch.device) -> nn.Module:
        from torch import nn

        with self._failing_to("wrap the model"):
            answer = self._hooks.wrap_model(model=model, config=config, device=device)
        return self._expect(nn.Module, "wrap_model", answer)

    def wrap_meta_model(
        self, model: nn.Module, config: StrategyConfig, device: torch.device, start: MetaStart
    ) -> nn.Module:
        from torch import nn

        with self._failing_to("wrap the model"):
            answer = self._hooks.wrap_meta_model(model=model, config=config, device=device, start=start)
        return self._expect(nn.Module, "wrap_meta_model", answer)

    def wrap_optimizer(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, config: StrategyConfig
    ) -> torch.optim.Optimizer:
        from torch.optim import Optimizer

        answer = self._hooks.wrap_optimizer(model=model, optimizer=optimizer, config=config)
        return self._expect(Optimizer, "wrap_optimizer", answer)

    def settle(self, model: nn.Module) -> None:
        self._hooks.settle(model=model)

    def model_state_dict(self, model: nn.Module, state_dict_type: StateDictType) -> dict[str, Any]:
        answer = self._hooks.model_state_dict(model=model, state_dict_type=state_dict_type)
        return self._expect(dict, "model_state_dict", answer)

    def load_model_state_dict(
        self, model: nn.Module, state_dict: dict[str, Any], state_dict_type: StateDictType
    ) -> None:
        self._hooks.load_model_state_dict(model=model, state_dict=state_dict, state_dict_type=state_dict_type)

    def optimizer_state_dict(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, state_dict_type: StateDictType
    ) -> dict[str, Any]:
        answer = self._hooks.optimizer_state_dict(model=model, optimizer=optimizer, state_dict_type=state_dict_type)
        found: dict[str, Any] = self._expect(dict, "optimizer_state_dict", answer)
        if found and not (isinstance(found.get("state"), dict) and isinstance(found.get("param_groups"), list)):
            self._refuse("optimizer_state_dict", f"a dict with {sorted(found)}", "one of 'state' and 'param_groups'")
        return found

    def load_optimizer_state_dict(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        state_dict: dict[str, Any],
        state_dict_type: StateDictType,
    ) -> None:
        self._hooks.load_optimizer_state_dict(
            model=model, optimizer=optimizer, state_dict=state_dict, state_dict_type=state_dict_type
        )

    def local_shards(self, model: nn.Module) -> dict[str, LocalShard]:
        from parallel_core.local_shards import LocalShard

        return self._expect_values(LocalShard, "local_shards", self._hooks.local_shards(model=model))

    @property
    def has_local_shards(self) -> bool:
        """Whether `local_shards` tells how this strategy's tensors lie: it answers that, or leaves all state to us."""
        return self._answers("local_shards") or not any(map(self._answers, STATE_DICT_HOOKS))

    def clip_grad_norm(self, model: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
        from torch import Tensor

        answer = self._hooks.clip_grad_norm(model=model, max_norm=max_norm, norm_type=norm_type)
        norm = self._expect(Tensor, "clip_grad_norm", answer)
        if norm.dim():
            self._refuse("clip_grad_norm", f"a tensor of shape {list(norm.shape)}", "one without dimensions")
        return norm

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._hooks.no_sync(model=model)
        return self._expect(AbstractContextManager, "no_sync", context)  # type: ignore[type-abstract]  # for isinstance

    def has_unsynchronised_gradients(self, model: nn.Module) -> bool:
        answer = self._hooks.has_unsynchronised_gradients(model=model)
        return self._expect(bool, "has_unsynchronised_gradients", answer)

    def grad_scaler(self, model: nn.Module) -> torch.amp.GradScaler:
        from torch.amp import GradScaler

        return self._expect(GradScaler, "grad_scaler", self._hooks.grad_scaler(model=model))

    def data_parallel(self, model: nn.Module) -> tuple[int, int]:
        answer: tuple[Any, ...] = self._expect(tuple, "data_parallel", self._hooks.data_parallel(model=model))
        if len(answer) != 2 or not all(isinstance(each, int) for each in answer) or not 0 <= answer[0] < answer[1]:
            self._refuse("data_parallel", repr(answer), "(index, count), with an index from 0 to count - 1")
        return answer

    @contextmanager
    def _failing_to(self, what: str) -> Iterator[None]:
        try:
            yield
        except ParallelCoreError:
            raise
        except Exception as error:
            raise WrapError(f"strategy {self} failed to {what}: {type(error).__name__}: {error}") from error

    def _answers(self, hook: str) -> bool:
        implementations = getattr(self._hooks, hook).get_hookimpls()
        return any(each.plugin_name == self.name for each in implementations)
