"""fsdp2 keeps the contract of a strategy."""

from __future__ import annotations

import pytest

from parallel_core.testing.conformance import StrategyConformance
from parallel_core.testing.models import CASES


class TestFSDP2(StrategyConformance):
    strategy = "fsdp2"
    world_sizes = (2, 3)
    models = ["language_model", "small_parameters", "adapter"]
    options = {"mixed_precision": "fp32", "auto_wrap_min_params": 100}
    refuses = {"scalar_parameter": "'temperature'", "mixed_dtypes": "bfloat16"}


@pytest.mark.deep
class TestFSDP2OnTheOtherModels(TestFSDP2):
    models = [name for name in CASES if name not in TestFSDP2.models]
