"""The conformance kit: every clause of the contract as a test, for the author of a strategy.

A strategy tests itself with three lines:

    class TestMine(StrategyConformance):
        strategy = "mine"
        options = {"every": 1}

and pytest, which has the fixture `ranks` from `parallel-core[testing]`, runs all clauses on ranks on the CPU. What else
a class can declare is in `Declaration`.
"""

from __future__ import annotations

from parallel_core.testing.conformance.checkpoint_clauses import CheckpointClauses
from parallel_core.testing.conformance.compile_clauses import CompileClauses
from parallel_core.testing.conformance.config_clauses import ConfigClauses
from parallel_core.testing.conformance.declaration import Capability, Declaration
from parallel_core.testing.conformance.misfit_clauses import MisfitClauses
from parallel_core.testing.conformance.optimizer_clauses import OptimizerClauses
from parallel_core.testing.conformance.start_clauses import StartClauses
from parallel_core.testing.conformance.state_clauses import StateClauses
from parallel_core.testing.conformance.training_clauses import TrainingClauses
from parallel_core.testing.conformance.wrap_clauses import WrapClauses

__all__ = ["Capability", "Declaration", "StrategyConformance"]


class StrategyConformance(
    ConfigClauses,
    WrapClauses,
    StartClauses,
    TrainingClauses,
    CompileClauses,
    StateClauses,
    MisfitClauses,
    OptimizerClauses,
    CheckpointClauses,
):
    """Every clause of the contract; subclass it and declare the strategy."""
