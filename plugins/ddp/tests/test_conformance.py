"""ddp keeps the contract of a strategy."""

from __future__ import annotations

from parallel_core.testing.conformance import Capability, StrategyConformance


class TestDDP(StrategyConformance):
    strategy = "ddp"
    world_sizes = (2, 3)
    options_for = {"unused_parameter": {"find_unused_parameters": True}}
    lacks = {Capability.SHARDING: "every rank holds the whole model"}
