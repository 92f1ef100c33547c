"""Memory and time of saving and loading checkpoints on 2 CPU ranks, against torch.distributed.checkpoint by hand.

    python benchmarks/checkpoints.py [--width 1024] [--depth 11] [--repeat 3] [--folder DIR]

Growth is the highest resident memory of a rank during the call, above what it was just before, as a share of the
model's bytes or, with AdamW, of all the bytes saved. No file is mapped into memory here: it is all memory of the rank's
own. "Kept" is what is left of it after a load, beyond the rank's own optimizer state. The numbers are those of rank 0
and rank 1. Time is the shortest of the repeats, on the slower rank. It reads Linux's /proc.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from parallel_core import (
    DistributedConfig,
    load_checkpoint,
    process_group,
    ranks,
    save_checkpoint,
    wrap_model_for_training,
)

STRATEGIES = ("ddp", "fsdp", "fsdp2")
VOCABULARY = 8192


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    strategy: str
    adamw: bool
    kind: str
    by_hand: bool = False
    checksum: bool = False


@dataclass(frozen=True)
class Measured:
    """What one rank measured: bytes and seconds, of a save and of a load."""

    saved_bytes: int
    save_growth: int
    save_time: float
    load_growth: int
    load_kept: int
    load_time: float


class Transformer(nn.Module):
    """A language model of blocks of equal size, with a head that is the embedding."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits


def config_of(strategy: str) -> DistributedConfig:
    """Return the settings of a strategy: full precision, a unit for each block."""
    settings = {
        f"{strategy}_mixed_precision": "fp32",
        f"{strategy}_wrap_layers": ("TransformerEncoderLayer",),
        f"{strategy}_sync_module_states": False,
    }
    return DistributedConfig(parallel_strategy=strategy, **({} if strategy == "ddp" else settings))


def made(case: Case, width: int, depth: int, *, stepped: bool) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    """Return a wrapped model, and its optimizer, which has state if it has stepped."""
    torch.manual_seed(0)
    model: nn.Module = Transformer(width, depth)
    model = wrap_model_for_training(model, config_of(case.strategy)) or model
    if not case.adamw:
        return model, None
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    if stepped:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_by_hand(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Save as the documentation of torch has it."""
    state: dict[str, Any] = {}
    if optimizer is None:
        state["model"] = get_model_state_dict(model)
    else:
        state["model"], state["optimizer"] = get_state_dict(model, optimizer)
    dcp_save(state, checkpoint_id=place)


def load_by_hand(place: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Load as the documentation of torch has it."""
    state: dict[str, Any] = {}
    if optimizer is None:
        state["model"] = get_model_state_dict(model)
        dcp_load(state, checkpoint_id=place)
        set_model_state_dict(model, state["model"])
        return
    state["model"], state["optimizer"] = get_state_dict(model, optimizer)
    dcp_load(state, checkpoint_id=place)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def measure(case: Case, width: int, depth: int, repeat: int, folder: Path) -> list[Measured]:
    """Save and load some times, and return the least of what every rank measured, by rank."""
    model, optimizer = made(case, width, depth, stepped=True)
    size = sum(parameter.numel() * 4 for parameter in Transformer(width, depth).to("meta").parameters())
    place = folder / "checkpoint"
    save: Callable[..., object]
    load: Callable[..., object]
    if case.by_hand:
        save, load = partial(save_by_hand, place), partial(load_by_hand, place)
    else:
        save = partial(save_checkpoint, place, state_dict_type=case.kind, checksum=case.checksum)
        load = partial(load_checkpoint, place, verify=case.checksum)
    saves = [growth(partial(save, model, optimizer)) for _ in range(repeat)]
    del model, optimizer
    loads = []
    for _ in range(repeat):
        model, optimizer = made(case, width, depth, stepped=False)
        loads.append(growth(partial(load, model, optimizer)))
        own = 0 if optimizer is None else sum(local_bytes(value) for value in state_tensors(optimizer))
        loads[-1] = (*loads[-1], own)
        del model, optimizer
    found = Measured(
        size * (3 if case.adamw else 1),
        min(each[0] for each in saves),
        min(each[1] for each in saves),
        min(each[0] - each[3] for each in loads),
        min(each[2] - each[3] for each in loads),
        min(each[1] for each in loads),
    )
    gathered: list[Measured] = ranks.all_gather(found)
    return gathered


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of an optimizer's state."""
    found = [value for entries in optimizer.state.values() for value in entries.values()]
    return [value for value in found if isinstance(value, torch.Tensor)]


def local_bytes(tensor: torch.Tensor) -> int:
    """Return how many bytes of a tensor this rank has."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def growth(work: Callable[[], object]) -> Any:
    """Return the growth of this rank's memory at its highest, the seconds, and the growth that stays."""
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    peak = memory("VmHWM")
    gc.collect()
    return peak - before, seconds, memory("VmRSS") - before


def memory(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) * 1024


def run_rank(rank: int, port: int, answer: Any, function: Callable[[], list[Measured]]) -> None:
    """Run a function on a rank, and hand on what rank 0 returns."""
    # As a launcher would set them; both ranks are on this machine.
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ |= dict(zip(names, (str(rank), str(rank), "2", "127.0.0.1", str(port)), strict=True))
    torch.set_num_threads(1)
    with process_group(DistributedConfig(backend="gloo")):
        measured = function()
        if rank == 0:
            answer.put(measured)


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def cases() -> list[Case]:
    """Return the lines of the table."""
    found = []
    for strategy in STRATEGIES:
        for adamw in (False, True):
            found.append(Case(strategy, adamw, "full"))
            found.append(Case(strategy, adamw, "sharded"))
            if not adamw:
                found.append(Case(strategy, adamw, "sharded", checksum=True))
            found.append(Case(strategy, adamw, "sharded", by_hand=True))
    return found


def main() -> None:
    """Measure every case, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=11)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=STRATEGIES, help="measure one strategy alone")
    parser.add_argument("--folder", type=Path, help="where to save; by default a temporary folder")
    options = parser.parse_args()
    # Freed tensors go back to the system at once; otherwise the peak would be that of the allocator's habits.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    table = Table("", "save: growth", "save: time", "load: growth", "load: kept", "load: time", box=None)
    for case in cases():
        if options.only not in (None, case.strategy):
            continue
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            answer = mp.get_context("spawn").SimpleQueue()
            work = partial(measure, case, options.width, options.depth, options.repeat, folder)
            mp.spawn(  # type: ignore[attr-defined,no-untyped-call]  # torch leaves it untyped
                run_rank, args=(free_port(), answer, work), nprocs=2
            )
            found: list[Measured] = answer.get()
        finally:
            shutil.rmtree(folder)
        hashed = ", with hashes" if case.checksum else ""
        whose = "by hand" if case.by_hand else f"{case.kind}{hashed}"
        shares = [
            ", ".join(f"{getattr(each, field) / each.saved_bytes:.1%}" for each in found)
            for field in ("save_growth", "load_growth", "load_kept")
        ]
        times = [f"{max(getattr(each, field) for each in found):.2f} s" for field in ("save_time", "load_time")]
        label = f"{case.strategy}{' with AdamW' if case.adamw else ''}, {whose}"
        table.add_row(label, shares[0], times[0], shares[1], shares[2], times[1])
        Console().print(label, shares, times)
    Console().print(table)


if __name__ == "__main__":
    main()
