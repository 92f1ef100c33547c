"""What a test asks of the ranks, and what it takes to hand that to each of them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel_core.testing.measuring import wanted
from parallel_core.testing.protocol import Call
from parallel_core.testing.template_process import FIXED_ENVIRONMENT


@dataclass(frozen=True, kw_only=True)
class Task:
    """One function to run on ranks; the fields are as in :class:`parallel_core.testing.Ranks`."""

    function: bytes
    world_size: int
    timeout: float
    backend: str
    process_group: bool
    env: Mapping[str, str | None]
    filters: list[tuple[Any, ...]]
    measured: Collection[int]
    """The ranks on which coverage is measured, if it is."""

    @contextmanager
    def calls(self) -> Iterator[list[Call]]:
        """Give the call for each rank; what the ranks find each other by lasts as long as the context."""
        with _meeting_point(self.world_size, self.process_group) as (store, variables):
            yield [self._call(rank, store, variables) for rank in range(self.world_size)]

    def _call(self, rank: int, store: str | None, variables: dict[str, str]) -> Call:
        index, size = str(rank), str(self.world_size)
        own = {"RANK": index, "LOCAL_RANK": index, "ROLE_RANK": index, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environment: dict[str, str | None] = {**os.environ, **FIXED_ENVIRONMENT, **own, **variables, **self.env}
        return Call(
            rank=rank,
            world_size=self.world_size,
            function=self.function,
            environment={name: value for name, value in environment.items() if value is not None},
            directory=str(Path.cwd()),
            search_path=list(sys.path),
            filters=self.filters,
            timeout=self.timeout,
            backend=self.backend,
            store=store,
            coverage=wanted() if rank in self.measured else "",
        )


@contextmanager
def _meeting_point(world_size: int, process_group: bool) -> Iterator[tuple[str | None, dict[str, str]]]:
    """Give what the ranks find each other by: a file, or the variables that torchrun would set."""
    if process_group:
        with tempfile.TemporaryDirectory(prefix="parallel-core-ranks-") as directory:
            yield str(Path(directory, "store")), {}
        return
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

    # Held by this process, as torchrun's agent does: the port is bound before a rank knows of it, so none can take it.
    store = TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    yield (
        None,
        {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": str(world_size),
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "parallel_core",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        },
    )
