"""Clauses on state dicts that do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import parallel_core
from parallel_core import StateDictError
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.declaration import Declaration
from parallel_core.testing.conformance.runs import KINDS, Run, cloned, differences, scramble


def lose_a_key(state_dict: dict[str, Any]) -> None:
    del state_dict["blocks.1.up.weight"]


def add_a_key(state_dict: dict[str, Any]) -> None:
    state_dict["blocks.1.up.ghost"] = torch.ones(2)


def reshape(state_dict: dict[str, Any]) -> None:
    state_dict["blocks.1.up.weight"] = torch.ones(5, 5)


def narrow(state_dict: dict[str, Any]) -> None:
    state_dict["blocks.1.up.weight"] = state_dict["blocks.1.up.weight"].to(torch.bfloat16)


SPOILERS: dict[Callable[[dict[str, Any]], None], str] = {
    lose_a_key: "missing keys: 'blocks.1.up.weight'",
    add_a_key: "unexpected keys: 'blocks.1.up.ghost'",
    reshape: "'blocks.1.up.weight': wrong shape",
    narrow: "'blocks.1.up.weight': wrong dtype",
}


class MisfitClauses(Declaration):
    """What does not load, and what is loaded of it if asked."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_dict_that_does_not_fit_is_refused(self, ranks: Ranks, kind: str) -> None:
        """A key too few or too many, a wrong shape or dtype: one StateDictError on every rank, nothing is loaded."""
        config = self.config("blocks")
        spoiled = [[0]] if kind == "full" else [[0, 1], [0], [1]]

        def work() -> list[list[Any]]:
            run = Run("blocks", config)
            saved = cloned(parallel_core.model_state_dict(run.model, kind))
            scramble(run.model)
            before, answers = run.local(), []
            for spoil in SPOILERS:
                for spoiled_ranks in spoiled:
                    state_dict = dict(saved)
                    if collective.rank() in spoiled_ranks:
                        spoil(state_dict)
                    try:
                        parallel_core.load_model_state_dict(run.model, state_dict, kind)
                    except StateDictError as error:
                        answers.append([str(error), differences(run.local(), before)])
                    else:
                        return [[f"no error after {spoil.__name__}", []]]
            return answers

        first, second = ranks(work, timeout=30)
        assert first == second
        expected = [message for message in SPOILERS.values() for _ in spoiled]
        assert all(message in found for message, (found, _) in zip(expected, first, strict=True)), first
        assert [changes for _, changes in first] == [[]] * len(expected)

    @pytest.mark.parametrize("kind", KINDS)
    def test_loads_what_fits_if_not_strict(self, ranks: Ranks, kind: str) -> None:
        """With strict=False the true lists come back on every rank, the rest is loaded, what was missing is kept."""
        config = self.config("blocks")

        def work() -> list[Any]:
            run = Run("blocks", config)
            saved = parallel_core.model_state_dict(run.model, kind)
            state_dict = cloned(saved)
            before = run.local()
            if state_dict:
                lose_a_key(state_dict)
                add_a_key(state_dict)
            scramble(run.model)
            kept = run.local()["blocks.1.up.weight"]
            answer = parallel_core.load_model_state_dict(run.model, state_dict, kind, strict=False)
            return [tuple(answer), differences(run.local(), {**before, "blocks.1.up.weight": kept})]

        lists = (["blocks.1.up.weight"], ["blocks.1.up.ghost"])
        assert ranks(work, timeout=30) == [[lists, []], [lists, []]]
