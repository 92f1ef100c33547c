"""fsdp2 keeps the contract of a strategy."""

from __future__ import annotations

from parallel_core.testing.conformance import StrategyConformance


class TestFSDP2(StrategyConformance):
    strategy = "fsdp2"
    world_sizes = (2, 3)
    options = {"mixed_precision": "fp32", "auto_wrap_min_params": 100}
    refuses = {"scalar_parameter": "'temperature'", "mixed_dtypes": "bfloat16"}
