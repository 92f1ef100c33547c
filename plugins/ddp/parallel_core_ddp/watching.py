"""What `DistributedDataParallel` does not tell: that it has not averaged gradients, or knows nothing of a parameter."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from parallel_core import TrainingError
from parallel_core.outputs import tensors_in

WATCH = "_parallel_core_ddp_watch"


def watch(model: nn.Module, *, finds_unused: bool) -> None:
    """Watch the forward passes of a model from now on.

    Args:
        model: what `wrap_model` returns.
        finds_unused: whether a parameter may be without a gradient.
    """
    watcher = Watch(model, finds_unused=finds_unused)
    vars(model)[WATCH] = watcher
    model.register_forward_pre_hook(watcher.before)
    if isinstance(model, DistributedDataParallel):
        model.register_forward_hook(watcher.after)


def has_unsynchronised_gradients(model: nn.Module) -> bool:
    """Return whether the last backward pass was under `no_sync`, and what it left has not been zeroed."""
    watcher: Watch = vars(model)[WATCH]
    return watcher.waits and any(parameter.grad is not None for parameter in watcher.parameters)


class Watch:
    """Hooks around the forward of one model, in whose own attributes it lies, so that a copy of it has its own.

    Attributes:
        parameters: all of the model's.
        waits: whether the last backward pass averaged nothing.
        averaged_in: the last backward pass that averaged, by torch's number for it.
    """

    def __init__(self, model: nn.Module, *, finds_unused: bool) -> None:
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        named = dict(inner.named_parameters())
        self.names, self.parameters = list(named), list(named.values())
        self.trained = [parameter.requires_grad for parameter in self.parameters]
        self.finds_unused = finds_unused
        self.waits = False
        self.averaged_in = -1

    # The compiler is to leave both alone, as it leaves DistributedDataParallel's own.

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def before(self, *_: object) -> None:
        """Compare what trains now with what trained at the wrap: nothing else is averaged, and all of it is waited for.

        Raises:
            TrainingError: they differ.
        """
        if not torch.is_grad_enabled():
            return
        trained = [parameter.requires_grad for parameter in self.parameters]
        if trained == self.trained:
            return
        changes = list(zip(self.names, self.trained, trained, strict=True))
        thawed = [name for name, before, now in changes if now and not before]
        if thawed:
            raise TrainingError(
                f"parameter {thawed[0]!r} needs a gradient now and needed none at the wrap, so that ddp would never "
                f"average it; set requires_grad before the wrap"
            )
        # With nothing to train there is nothing to wait for: a part of a larger loss, as a GAN has one.
        if any(trained) and not self.finds_unused:
            frozen = next(name for name, before, now in changes if before and not now)
            raise TrainingError(
                f"parameter {frozen!r} was frozen after the wrap, and ddp waits for its gradient; set requires_grad "
                f"before the wrap, or set ddp_find_unused_parameters = true"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's
    def after(self, module: DistributedDataParallel, _: object, output: object) -> None:
        """Note, when the backward pass of this forward comes, whether it communicates: the forward decides that."""
        if not torch.is_grad_enabled():
            return
        waits = not module.require_backward_grad_sync

        def note(_: torch.Tensor) -> None:
            backward_pass = torch._C._current_graph_task_id()
            if not waits:
                self.averaged_in = backward_pass
            # One pass through several forwards averages all of them where one of them would alone.
            self.waits = backward_pass != self.averaged_in

        trained = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        for tensor in trained:
            tensor.register_hook(note)
        if not trained:
            self.waits = waits  # they may lie in an object of the user's own: taken for granted, as nothing will tell
