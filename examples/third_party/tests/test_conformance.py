from parallel_core.testing.conformance import Capability, StrategyConformance


class TestLocalSGD(StrategyConformance):
    strategy = "localsgd"
    options = {"every": 1}
    lacks = dict.fromkeys(
        (Capability.SAME_LOSSES, Capability.SHARDING, Capability.QUIET_ACCUMULATION), "each rank trains a whole model"
    )
