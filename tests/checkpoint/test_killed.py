"""Whatever a killed process leaves, the last complete checkpoint loads, and the next save cleans up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoint import killing
from tests.commands import python


@pytest.mark.parametrize("rounds", [6, pytest.param(40, marks=pytest.mark.deep)])
def test_after_a_kill_at_any_moment_the_last_complete_checkpoint_loads(tmp_path: Path, rounds: int) -> None:
    """One rank killed, or all, in saves of both kinds: what loads is whole, and no older than what was reported saved.

    A rank that is left over raises a CheckpointError (its process ends with 3) and does not wait.
    """
    (tmp_path / "run").mkdir()
    lines = python(killing.__file__, tmp_path / "run", str(rounds), cwd=tmp_path).splitlines()
    *found, end = (json.loads(line) for line in lines if line.startswith("{"))
    assert len(found) == rounds
    for each in found:
        assert each["alike"], each
        assert each["saved"] <= each["step"] <= each["saved"] + 1, each
        ended = [-9 if rank in each["victims"] else 3 for rank in range(killing.WORLD_SIZE)]
        assert each["codes"] == ended, each
    assert {tuple(each["victims"]) for each in found} == {(0,), (1,), (0, 1)}
    assert end == {"left": ["last"]}
