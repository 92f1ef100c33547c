"""fsdp2 keeps the contract of a strategy."""

from __future__ import annotations

import pytest

from parallel_core.testing.conformance import StrategyConformance

# To measure takes half as long again as to run, and the kit is measured where ddp runs it.
pytestmark = pytest.mark.no_cover


class TestFSDP2(StrategyConformance):
    strategy = "fsdp2"
    world_sizes = (2, 3)
    options = {"mixed_precision": "fp32", "auto_wrap_min_params": 100}
    refuses = {"scalar_parameter": "'temperature'", "mixed_dtypes": "bfloat16"}
