"""Clauses on checkpoints: what is saved on the disk, and what comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parallel_core
from parallel_core import ranks as collective
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.declaration import Declaration
from parallel_core.testing.conformance.runs import KINDS, Run, differences, for_each, problems, scramble


class CheckpointClauses(Declaration):
    """What `save_checkpoint` writes of a wrapped model, and what `load_checkpoint` makes of it."""

    def test_a_checkpoint_comes_back(self, ranks: Ranks, tmp_path: Path, world_size: int) -> None:
        """Saved as either kind and loaded into another model, all is the same bits; a save changes none of them.

        Where ranks differ, what comes back is what rank 0 had.
        """

        def work(case: str, config: Any) -> list[str]:
            run, other = Run(case, config, seed=1), Run(case, config, seed=2)
            run.train(range(1))
            expected, before = run.held(whole_from_rank_0=True), run.held()
            for kind in KINDS:
                parallel_core.save_checkpoint(
                    tmp_path / case / kind, run.model, run.optimizer, state_dict_type=kind, extra={"step": 1}
                )
            lines = differences(run.held(), before, where="after the saves")
            for kind in KINDS:
                loaded = parallel_core.load_checkpoint(tmp_path / case / kind, other.model, other.optimizer)
                if loaded != parallel_core.LoadedCheckpoint({"step": 1}, [], []):
                    lines.append(f"{kind}: {loaded}")
                lines += differences(other.held(), expected, where=kind)
                if kind != KINDS[-1]:
                    scramble(other.model)
                    other.train(range(1))  # the optimizer's state is another one again, too
            return lines

        assert problems(ranks(for_each, self.cases_on(world_size), work, world_size=world_size)) == []

    def test_a_checkpoint_moves_to_one_process_and_back(self, ranks: Ranks, tmp_path: Path) -> None:
        """The bare model loads what the strategy saved, the strategy what the bare model saved, as the same bits."""
        cases = self.cases(telling=True)

        def save(case: str, config: Any) -> dict[str, Any]:
            run = Run(case, config, seed=1)
            run.train(range(2))
            for kind in KINDS:
                parallel_core.save_checkpoint(
                    tmp_path / case / kind, run.model, run.optimizer, state_dict_type=kind, checksum=False
                )
            return run.state()

        def load(case: str, config: Any) -> list[str]:
            lines = []
            for kind in KINDS:
                run = Run(case, config, seed=2)
                parallel_core.load_checkpoint(tmp_path / case / kind, run.model, run.optimizer)
                found = run.state()
                lines += differences(found, expected[case] if collective.rank() == 0 else found, where=kind)
            return lines

        expected, *_ = ranks(for_each, cases, save)
        bare = dict.fromkeys(cases)
        assert problems(ranks(for_each, bare, load, world_size=1, process_group=False)) == []
        (expected,) = ranks(for_each, bare, save, world_size=1, process_group=False)
        assert problems(ranks(for_each, cases, load)) == []

    def test_training_goes_on_from_a_checkpoint(self, ranks: Ranks, tmp_path: Path) -> None:
        """The steps after a load are those of a run that never stopped, to the last bit; so are those after a save."""

        def work(case: str, config: Any) -> list[str]:
            run, saved = Run(case, config), Run(case, config)
            run.train(range(2))
            saved.train(range(2))
            parallel_core.save_checkpoint(tmp_path / case, saved.model, saved.optimizer, checksum=False)
            resumed = Run(case, config, seed=3)
            parallel_core.load_checkpoint(tmp_path / case, resumed.model, resumed.optimizer)
            losses = [each.train(range(2, 4)) for each in (run, saved, resumed)]
            return [f"losses {losses[0]}, with a save between {losses[1]}, from a checkpoint {losses[2]}"] * (
                losses != [losses[0]] * 3
            )

        assert problems(ranks(for_each, self.cases(training=True, telling=True), work)) == []
