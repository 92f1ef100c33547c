"""ddp keeps the contract of a strategy."""

from __future__ import annotations

import pytest

from parallel_core.testing.conformance import Capability, StrategyConformance
from parallel_core.testing.models import CASES

# To measure takes half as long again as to run, and the kit is measured where fsdp2 runs it.
pytestmark = pytest.mark.no_cover


class TestDDP(StrategyConformance):
    strategy = "ddp"
    world_sizes = (2, 3)
    models = ["language_model", "small_parameters", "adapter"]
    options_for = {"unused_parameter": {"find_unused_parameters": True}}
    lacks = {Capability.SHARDING: "every rank holds the whole model"}


@pytest.mark.deep
class TestDDPOnTheOtherModels(TestDDP):
    models = [name for name in CASES if name not in TestDDP.models]
