"""Local SGD: each rank takes steps of its own; every few steps the ranks average weights and optimizer state."""

from itertools import count
from typing import Annotated, Any

from msgspec import Meta

from parallel_core import StrategyConfig, hookimpl


class LocalSGDConfig(StrategyConfig):
    every: Annotated[int, Meta(ge=1)] = 8  # steps from one averaging to the next


strategy_config = hookimpl(lambda: LocalSGDConfig)


@hookimpl
def wrap_model(model: Any, device: Any) -> Any:
    from parallel_core import ranks

    for tensor in (*model.to(device).parameters(), *model.buffers()):
        ranks.broadcast_tensor(tensor)
    return model


@hookimpl
def wrap_optimizer(model: Any, optimizer: Any, config: LocalSGDConfig) -> Any:
    import torch.distributed as dist

    steps = count(1)

    def average(*_: Any) -> None:
        if next(steps) % config.every == 0:
            for parameter in model.parameters():
                for tensor in (parameter, *optimizer.state.get(parameter, {}).values()):
                    if parameter.requires_grad and tensor.shape == parameter.shape:  # a step count is alike as it is
                        dist.all_reduce(tensor.data.div_(dist.get_world_size()))

    optimizer.register_step_post_hook(average)
    return optimizer
