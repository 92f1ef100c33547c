"""The settings that strategies which cut a model into shards have in common.

For strategy authors: a strategy's own struct is a subclass, with the fields that it alone has. What the settings come
to on a model is in `parallel_core.sharding`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta

from parallel_core.strategy_config import StrategyConfig

__all__ = ["Precision", "ShardingConfig"]

Precision = Literal["fp32", "bf16", "fp16"]


class ShardingConfig(StrategyConfig):
    """The settings of a strategy that cuts parameters, gradients and optimizer state into shards.

    Attributes:
        mixed_precision: the dtype of computation. Parameters, optimizer state and state dicts keep the dtype of the
            bare model, and `fp32` means no casting at all.
        reduce_precision: the dtype in which gradients are reduced; by default that of `mixed_precision`.
        auto_wrap_min_params: a module with at least this many parameters that are not in an inner unit becomes a unit;
            see `parallel_core.units.choose_units`.
        wrap_layers: names of classes; each module of one of them becomes a unit, whole.
        sharding: `full` gathers a unit's parameters for its forward and again for its backward; `grad_op` keeps them
            from the forward to the backward; `hybrid` is `full` inside of groups of ranks, with a replica in each.
        hybrid_shard_size: the number of ranks of such a group; by default the ranks of one machine.
        cpu_offload: keep parameters, gradients and optimizer state on the CPU while they are not needed; needs an
            accelerator.
        activation_checkpointing: keep a unit's inputs alone for its backward, and compute its forward again there.
        sync_module_states: take the initial values from rank 0; otherwise they are compared, and must be the same.
    """

    mixed_precision: Precision = "bf16"
    reduce_precision: Precision | None = None
    auto_wrap_min_params: Annotated[int, Meta(ge=0)] = 10_000_000
    wrap_layers: tuple[str, ...] = ()
    sharding: Literal["full", "grad_op", "hybrid"] = "full"
    hybrid_shard_size: Annotated[int, Meta(ge=2)] | None = None
    cpu_offload: bool = False
    activation_checkpointing: bool = False
    sync_module_states: bool = True

    def problems(self) -> Iterable[str]:
        """Return what is wrong across fields; a subclass with rules of its own adds them to these."""
        if self.hybrid_shard_size is not None and self.sharding != "hybrid":
            yield (
                f"hybrid_shard_size = {self.hybrid_shard_size} is in vain with sharding = {self.sharding!r}; set "
                f"sharding = 'hybrid', or leave it out"
            )

    def lost_if_declined(self) -> Iterable[str]:
        """Return the fields that ask for something which the bare model lacks."""
        if self.mixed_precision != "fp32":
            yield "mixed_precision"
        if self.cpu_offload:
            yield "cpu_offload"
        if self.activation_checkpointing:
            yield "activation_checkpointing"
