"""What authors of strategies test with: functions run on ranks, in a pool of worker processes.

Installing ``parallel-core[testing]`` gives pytest the fixture ``ranks``::

    import torch
    import torch.distributed as dist
    from parallel_core.testing import Ranks


    def test_all_reduce_sums_over_the_ranks(ranks: Ranks) -> None:
        def work() -> float:
            value = torch.tensor(float(dist.get_rank()))
            dist.all_reduce(value)
            return value.item()

        assert ranks(work, world_size=3) == [3.0, 3.0, 3.0]

See :class:`Ranks` for what holds on a rank, and :class:`RanksFailed` for what a failure tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel_core.testing.fixture import Ranks as Ranks
    from parallel_core.testing.outcome import Outcome as Outcome
    from parallel_core.testing.outcome import RanksFailed as RanksFailed

__all__ = ["Outcome", "Ranks", "RanksFailed"]

# pytest imports this package in every run of everyone who has parallel-core installed: nothing is imported before it
# is used.
_HOMES = {
    "Outcome": "parallel_core.testing.outcome",
    "Ranks": "parallel_core.testing.fixture",
    "RanksFailed": "parallel_core.testing.outcome",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
