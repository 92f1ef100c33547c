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


Spoiler = Callable[[dict[str, Any]], None]

SPOILERS: dict[Spoiler, str] = {
    lose_a_key: "missing keys: 'blocks.1.up.weight'",
    add_a_key: "unexpected keys: 'blocks.1.up.ghost'",
    reshape: "'blocks.1.up.weight': wrong shape",
    narrow: "'blocks.1.up.weight': wrong dtype",
}


class MisfitClauses(Declaration):
    """What does not load, and what is loaded of it if asked."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("spoil", SPOILERS)
    def test_a_dict_that_does_not_fit_is_refused(self, ranks: Ranks, spoil: Spoiler, kind: str) -> None:
        """A key too few or too many, a wrong shape or dtype: one StateDictError on every rank, nothing is loaded."""
        config = self.config("blocks")

        def work(everywhere: bool) -> list[Any]:
            run = Run("blocks", config)
            state_dict = dict(parallel_core.model_state_dict(run.model, kind))
            if collective.rank() == 0 or (everywhere and kind == "sharded"):
                spoil(state_dict)
            scramble(run.model)
            before = run.local()
            try:
                parallel_core.load_model_state_dict(run.model, state_dict, kind)
            except StateDictError as error:
                return [str(error), differences(run.local(), before)]
            return ["no error", []]

        for everywhere in (True, False):
            found = ranks(work, everywhere, timeout=30)
            assert found[0] == found[1]
            assert SPOILERS[spoil] in found[0][0]
            assert found[0][1] == []

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
