"""fsdp keeps the contract of a strategy."""

from __future__ import annotations

import pytest

from parallel_core.testing.conformance import Capability, StrategyConformance
from parallel_core.testing.models import CASES

# To measure takes half as long again as to run, and the kit is measured where fsdp2 runs it.
pytestmark = pytest.mark.no_cover


class TestFSDP(StrategyConformance):
    strategy = "fsdp"
    world_sizes = (2, 3)
    models = ["language_model", "small_parameters", "adapter"]
    options = {"mixed_precision": "fp32", "auto_wrap_min_params": 100}
    lacks = {Capability.UNUSED_PARAMETERS: "the parameters of a unit share one gradient, zero where nothing flows"}
    refuses = {"scalar_parameter": "'temperature' has no dimensions", "mixed_dtypes": "float32 .* and bfloat16"}


@pytest.mark.deep
class TestFSDPOnTheOtherModels(TestFSDP):
    models = [name for name in CASES if name not in TestFSDP.models]
