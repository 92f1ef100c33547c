"""A sound strategy in a few lines, and others that each break one clause of the contract.

This file is copied beside a distribution's metadata and imported on ranks as a strategy's module would be.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from parallel_core import StateDictType, StrategyConfig, hookimpl


class SoundConfig(StrategyConfig):
    twice: bool = False


class Sound:
    """Data parallelism by hand: gradients are averaged as they are made."""

    @hookimpl
    def strategy_config(self) -> type[SoundConfig]:
        return SoundConfig

    @hookimpl
    def wrap_model(self, model: Any) -> Any:
        self.start(model)
        model.is_quiet = False
        owner = weakref.ref(model)  # a tensor's hook that held the model would keep both alive for good
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda parameter: self.average(owner(), parameter))
        return model

    @hookimpl
    def no_sync(self, model: Any) -> AbstractContextManager[None]:
        return self.quiet(model)

    def start(self, model: Any) -> None:
        from parallel_core import ranks

        for tensor in (*model.parameters(), *model.buffers()):
            ranks.broadcast_tensor(tensor)

    def average(self, model: Any, parameter: Any) -> None:
        import torch.distributed as dist

        if not model.is_quiet:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    @contextmanager
    def quiet(self, model: Any) -> Iterator[None]:
        model.is_quiet = True
        try:
            yield
        finally:
            model.is_quiet = False


class ForgetsToBroadcast(Sound):
    def start(self, model: Any) -> None:
        pass


class SumsGradients(Sound):
    def average(self, model: Any, parameter: Any) -> None:
        import torch.distributed as dist

        if not model.is_quiet:
            dist.all_reduce(parameter.grad)


class KeepsGradientsToItself(Sound):
    def average(self, model: Any, parameter: Any) -> None:
        pass


class IgnoresNoSync(Sound):
    @contextmanager
    def quiet(self, model: Any) -> Iterator[None]:
        yield


class StaysQuietAfterAnError(Sound):
    @contextmanager
    def quiet(self, model: Any) -> Iterator[None]:
        model.is_quiet = True
        yield
        model.is_quiet = False


class CastsToBf16(Sound):
    @hookimpl
    def wrap_model(self, model: Any) -> Any:
        import torch

        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).float()
        return super().wrap_model(model)


class ClipsLocally(Sound):
    @hookimpl
    def clip_grad_norm(self, model: Any, max_norm: float, norm_type: float) -> Any:
        import torch
        import torch.distributed as dist

        own = list(model.parameters())[dist.get_rank() :: dist.get_world_size()]
        return torch.nn.utils.clip_grad_norm_(own, max_norm, norm_type)


class GivesEveryRankTheSameData(Sound):
    @hookimpl
    def data_parallel(self) -> tuple[int, int]:
        import torch.distributed as dist

        return 0, dist.get_world_size()


class NeverDeclines(Sound):
    @hookimpl
    def applies(self) -> bool:
        return True

    def start(self, model: Any) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            super().start(model)


class LeaksAProcessGroup(Sound):
    @hookimpl
    def applies(self, world_size: int) -> bool:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return world_size > 1


class ChangesTheModelBeforeItRefuses(Sound):
    @hookimpl
    def check_model(self, model: Any) -> list[str]:
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
        return []


class PlansWhatIsNotThere(Sound):
    @hookimpl
    def plan_units(self, model: Any) -> Any:
        from parallel_core.units import Unit

        return [Unit("", model, {"nothing": next(model.parameters())})]


class StateDictHooks(Sound):
    """The defaults, to be spoilt by one of the methods below."""

    def saved(self, state: dict[str, Any], kind: StateDictType) -> dict[str, Any]:
        return state

    @hookimpl
    def model_state_dict(self, model: Any, state_dict_type: StateDictType) -> dict[str, Any]:
        from parallel_core import defaults

        state: dict[str, Any] = defaults.model_state_dict(model, state_dict_type)
        return self.saved(state, state_dict_type)


class PrefixesKeys(StateDictHooks):
    def saved(self, state: dict[str, Any], kind: StateDictType) -> dict[str, Any]:
        return {f"module.{name}": value for name, value in state.items()}


class DropsBuffers(StateDictHooks):
    def saved(self, state: dict[str, Any], kind: StateDictType) -> dict[str, Any]:
        return {name: value for name, value in state.items() if name not in ("offset", "order", "mask", "seen")}


class SavesOnEveryRank(StateDictHooks):
    @hookimpl
    def model_state_dict(self, model: Any, state_dict_type: StateDictType) -> dict[str, Any]:
        state: dict[str, Any] = model.state_dict()
        return {name: value.clone() if hasattr(value, "clone") else value for name, value in state.items()}


class SavesTheLiveTensors(StateDictHooks):
    @hookimpl
    def model_state_dict(self, model: Any, state_dict_type: StateDictType) -> dict[str, Any]:
        from parallel_core import ranks

        state: dict[str, Any] = model.state_dict()
        return {} if state_dict_type == "full" and ranks.rank() else state


class ShowsCopies(Sound):
    @hookimpl
    def local_shards(self, model: Any) -> dict[str, Any]:
        from dataclasses import replace

        from parallel_core import defaults

        shards = defaults.local_shards(model)
        return {name: replace(shard, tensor=shard.tensor.clone()) for name, shard in shards.items()}


class LoadsOnRank0Alone(Sound):
    @hookimpl
    def load_model_state_dict(self, model: Any, state_dict: Any, state_dict_type: StateDictType) -> None:
        from parallel_core import defaults, ranks

        if state_dict_type == "sharded":
            defaults.load_model_state_dict(model, state_dict, state_dict_type)
        elif ranks.rank() == 0:
            model.load_state_dict(state_dict, strict=False)


class HangsOnAMissingKey(Sound):
    @hookimpl
    def load_model_state_dict(self, model: Any, state_dict: Any, state_dict_type: StateDictType) -> None:
        from parallel_core import defaults, ranks

        if state_dict_type == "sharded":
            defaults.load_model_state_dict(model, state_dict, state_dict_type)
            return
        own = model.state_dict()
        for name in state_dict if ranks.rank() == 0 else own:
            if ranks.rank() == 0:
                own[name].copy_(state_dict[name])
            ranks.broadcast_tensor(own[name])


class StepsToReadState(Sound):
    @hookimpl
    def optimizer_state_dict(self, model: Any, optimizer: Any, state_dict_type: StateDictType) -> Any:
        from parallel_core import defaults

        if not optimizer.state:
            optimizer.step()
        return defaults.optimizer_state_dict(model, optimizer, state_dict_type)


class ForgetsTheOptions(Sound):
    @hookimpl
    def load_optimizer_state_dict(self, model: Any, optimizer: Any, state_dict: Any, state_dict_type: Any) -> None:
        from parallel_core import defaults
        from parallel_core.optimizer_state import named_groups
        from parallel_core.record import bare_parameters

        groups = named_groups(optimizer, bare_parameters(model))
        defaults.load_optimizer_state_dict(model, optimizer, {**state_dict, "param_groups": groups}, state_dict_type)
