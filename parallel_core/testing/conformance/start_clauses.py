"""Clauses on a model's first values: from the meta device, and from a state dict."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import parallel_core
from parallel_core import WrapError
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.declaration import Capability, Declaration
from parallel_core.testing.conformance.runs import differences, for_each, problems
from parallel_core.testing.models import CASES


def on_meta(case: str) -> nn.Module:
    with torch.device("meta"):
        return CASES[case].make()


def reset_in_order(case: str, seed: int) -> tuple[dict[str, Any], list[str]]:
    """Reset a case built on the CPU as one process would; return its state and the modules that can't be reset."""
    model = CASES[case].build()
    stuck: list[str] = []
    seen: set[nn.Module] = set()

    def visit(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        for child in module.children():
            visit(child)
        if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            reset = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
            if reset is None:
                stuck.append(type(module).__name__)
            else:
                reset()

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        visit(model)
    return model.state_dict(), stuck


class StartClauses(Declaration):
    """Where first values come from."""

    def test_starts_from_the_meta_device(self, ranks: Ranks, world_size: int) -> None:
        """Modules are reset in the order of one process, with rank 0's seed: the same bits, or a refusal by name."""

        def work(case: str, config: Any) -> list[str]:
            expected, stuck = reset_in_order(case, seed=5)
            torch.manual_seed(5 + collective.rank())
            try:
                model = parallel_core.wrap_model_for_training(on_meta(case), config)
            except WrapError as error:
                return [] if stuck and stuck[0] in str(error) else [str(error)]
            assert model is not None
            if stuck:
                return [f"{stuck} can't be reset, and no error said so"]
            return differences(parallel_core.model_state_dict(model), expected if collective.rank() == 0 else {})

        assert problems(ranks(for_each, self.cases_on(world_size), work, world_size=world_size)) == []

    def test_starts_from_a_state_dict(self, ranks: Ranks) -> None:
        """A meta model takes rank 0's values, computes what they lack or refuses it by name, and computes alike."""

        def work(case: str, config: Any) -> list[str]:
            bare = CASES[case].build(seed=4)
            persistent = bare.state_dict()
            computed = [name for name, _ in bare.named_buffers() if name not in persistent]
            given = persistent if collective.rank() == 0 else None
            try:
                model = parallel_core.wrap_model_for_training(on_meta(case), config, state_dict=given)
            except WrapError as error:
                return [] if computed and computed[0] in str(error) else [str(error)]
            assert model is not None
            inputs, _ = CASES[case].batch(seed=1)
            bare.eval()
            model.eval()
            with torch.no_grad():
                found = differences(model(inputs), bare(inputs), tolerance=1e-6)
            saved = parallel_core.model_state_dict(model)
            return found + differences(saved, persistent if collective.rank() == 0 else {})

        assert problems(ranks(for_each, self.cases(), work)) == []

    def test_refuses_a_state_dict_that_lacks_something(self, ranks: Ranks) -> None:
        """A key too few is one error on every rank, before a tensor is made."""
        config = self.config("blocks")

        def work() -> list[Any]:
            given = CASES["blocks"].build().state_dict() if collective.rank() == 0 else {}
            given.pop("blocks.1.up.weight", None)
            model = on_meta("blocks")
            try:
                parallel_core.wrap_model_for_training(model, config, state_dict=given)
            except parallel_core.StateDictError as error:
                return [str(error), all(parameter.is_meta for parameter in model.parameters())]
            return ["no error", False]

        first, second = ranks(work, timeout=30)
        assert first == second
        assert first[1] is True
        assert "missing keys: 'blocks.1.up.weight'" in first[0]

    def test_gives_a_single_process_its_values(self, ranks: Ranks) -> None:
        """With no process group a meta model gets the same values, and is returned bare."""
        self.needs(Capability.DECLINING)
        config = self.config("blocks")

        def work() -> list[Any]:
            expected, _ = reset_in_order("blocks", seed=5)
            model = on_meta("blocks")
            torch.manual_seed(5)
            answer = parallel_core.wrap_model_for_training(model, config, device="cpu")
            return [answer is model, differences(model.state_dict(), expected), parallel_core.wrap_report(model)]

        assert ranks(work, world_size=1, process_group=False) == [[True, [], None]]
