"""Clauses on `torch.compile`, of the whole model or of a part, before the wrap or after it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import parallel_core
from parallel_core.record import inner_module
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.declaration import Capability, Declaration
from parallel_core.testing.conformance.runs import KINDS, Run, cloned, differences, scramble

#: `aot_eager` without its search for memory to save, which takes more than a second to import on each rank.
BACKEND = "aot_eager_default_partitioner"


class CompileClauses(Declaration):
    """What is compiled."""

    # The compiler asks tensors for their `grad` while it guards them; what it is warned of there is its own affair.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    def test_trains_compiled(self, ranks: Ranks) -> None:
        """Through torch.compile of the wrapped model every verb works, with the same losses and names."""
        self.needs(Capability.COMPILE)
        config = self.config("blocks")

        def work() -> list[Any]:
            plain, run = Run("blocks", config), Run("blocks", config)
            expected = [plain.step(seed) for seed in range(3)]
            compiled: Any = torch.compile(run.model, backend=BACKEND)
            losses = []
            assert run.optimizer is not None
            for seed in range(3):
                with parallel_core.no_sync(compiled):
                    pass
                losses.append(run.backward(seed, model=compiled))
                parallel_core.clip_grad_norm(compiled, 1e9)
                parallel_core.wrap_optimizer(compiled, run.optimizer)
                run.optimizer.step()
                run.optimizer.zero_grad()
            assert isinstance(parallel_core.grad_scaler(compiled), torch.amp.GradScaler)
            changes = differences(parallel_core.model_state_dict(compiled), plain.full(), tolerance=1e-5)
            before = run.held()
            for kind in KINDS:
                weights = cloned(parallel_core.model_state_dict(compiled, kind))
                state = parallel_core.optimizer_state_dict(compiled, run.optimizer, kind)
                scramble(run.model)
                parallel_core.load_model_state_dict(compiled, weights, kind)
                parallel_core.load_optimizer_state_dict(compiled, run.optimizer, state, kind)
            return [losses, expected, [*changes, *differences(run.held(), before)]]

        for losses, expected, changes in ranks(work, timeout=90):
            assert losses == pytest.approx(expected, abs=1e-5)
            assert changes == []

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
    def test_trains_whatever_was_compiled(self, ranks: Ranks) -> None:
        """The model or a block of it, compiled before the wrap, and a block after it, train as they do otherwise."""
        self.needs(Capability.COMPILE)
        config = self.config("blocks")

        def work() -> dict[str, list[Any]]:
            plain = Run("blocks", config)
            expected = plain.train(range(3))
            found = {}
            for what in ("model before", "block before", "block after"):
                torch.compiler.reset()
                run = Run("blocks", config, change=compiled_block if what == "block before" else compiled_model)
                if what == "block after":
                    run = Run("blocks", config)
                    compiled_block(inner_module(run.model))
                losses = run.train(range(3))
                gap = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
                found[what] = [gap < 1e-5, differences(run.full(), plain.full(), tolerance=1e-5)]
            return found

        for found in ranks(work, timeout=120):
            assert found == {what: [True, []] for what in found}


def compiled_model(model: nn.Module) -> nn.Module:
    compiled: Any = torch.compile(model, backend=BACKEND)
    assert isinstance(compiled, nn.Module)
    return compiled


def compiled_block(model: nn.Module) -> nn.Module:
    """Compile a block of the case `blocks`, in its place."""
    blocks = model.get_submodule("blocks")
    blocks.register_module("1", compiled_model(blocks.get_submodule("1")))
    return model
