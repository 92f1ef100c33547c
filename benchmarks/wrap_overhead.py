"""Memory and time of a training step on 2 CPU ranks: this package against torch by hand, and strategy by strategy.

    python benchmarks/wrap_overhead.py [--steps 10] [--width 768] [--depth 8]

Each case runs in processes of its own. What rank 0 holds after a step is counted: bytes of parameters, gradients and
AdamW state. "Peak" is the resident memory of rank 0 at its highest in the steps, above what it was before the model was
built; it reads Linux's /proc. "Step" is the least processor time that rank 0 spent on a step, its waiting left out: it
shows work that one case has and another has not, and says nothing about GPUs or networks.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import time
from collections.abc import Callable, Iterable
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
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel

from parallel_core import DistributedConfig, process_group, wrap_model_for_training, wrap_optimizer

MIB = 2**20
BATCH = 16  # rows a rank


@dataclass(frozen=True)
class Case:
    """One line of the table: a config of this package, or the name of a wrap written by hand."""

    label: str
    config: DistributedConfig | None = None
    by_hand: str = ""


@dataclass(frozen=True)
class Measured:
    parameters: float
    gradients: float
    optimizer: float
    peak: float
    step: float


def cases(block_size: int) -> list[Case]:
    ddp, fsdp = (
        partial(DistributedConfig, parallel_strategy="ddp"),
        partial(DistributedConfig, parallel_strategy="fsdp"),
    )
    units = {"fsdp_auto_wrap_min_params": block_size}
    return [
        Case("ddp", ddp()),
        Case("ddp by hand", by_hand="ddp"),
        Case("ddp, no bucket view", ddp(ddp_gradient_as_bucket_view=False)),
        Case("fsdp fp32", fsdp(fsdp_mixed_precision="fp32", **units)),
        Case("fsdp fp32 by hand", by_hand="fsdp_fp32"),
        Case("fsdp fp32, no units", fsdp(fsdp_mixed_precision="fp32", fsdp_auto_wrap_min_params=10**12)),
        Case("fsdp bf16", fsdp(fsdp_mixed_precision="bf16", **units)),
        Case("fsdp bf16 by hand", by_hand="fsdp_bf16"),
    ]


def build(width: int, depth: int) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(depth)]
    return nn.Sequential(*blocks)


def wrap_by_hand(name: str, model: nn.Module, block_size: int) -> nn.Module:
    if name == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16) if name == "fsdp_bf16" else None
    return FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=block_size),
        mixed_precision=low,
        use_orig_params=True,
    )


def measure(case: Case, width: int, depth: int, steps: int, block_size: int) -> Measured:
    before = memory("VmRSS")
    torch.manual_seed(0)
    model = build(width, depth)
    if case.config is not None:
        model = wrap_model_for_training(model, case.config) or model
    else:
        model = wrap_by_hand(case.by_hand, model, block_size)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters())
    if case.config is not None:
        optimizer = wrap_optimizer(model, optimizer)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
    rows = torch.randn(BATCH, width)
    times = []
    for _ in range(steps):
        optimizer.zero_grad()
        dist.barrier()
        start = time.process_time()
        model(rows).float().square().mean().backward()
        optimizer.step()
        times.append(time.process_time() - start)
    state = [value for values in optimizer.state.values() for value in values.values()]
    return Measured(
        size_of(model.parameters()),
        size_of(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
        size_of(value for value in state if isinstance(value, torch.Tensor)),
        memory("VmHWM") - before,
        min(times),
    )


def size_of(tensors: Iterable[torch.Tensor]) -> float:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) / MIB


def memory(field: str) -> float:
    """Return a field of /proc/self/status in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def run_rank(rank: int, port: int, answer: Any, function: Callable[[], Measured]) -> None:
    # As a launcher would set them; both ranks are on this machine.
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ |= dict(zip(names, (str(rank), str(rank), "2", "127.0.0.1", str(port)), strict=True))
    torch.set_num_threads(1)
    with process_group(DistributedConfig(backend="gloo")):
        measured = function()
        if rank == 0:
            answer.put(measured)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--depth", type=int, default=8)
    options = parser.parse_args()
    block_size = sum(parameter.numel() for parameter in build(options.width, 1).parameters())
    # Freed tensors go back to the system at once; otherwise the peak would be that of the allocator's habits.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    console = Console()
    table = Table("", "parameters", "gradients", "AdamW state", "peak", "step", box=None)
    for case in cases(block_size):
        answer = mp.get_context("spawn").SimpleQueue()
        work = partial(measure, case, options.width, options.depth, options.steps, block_size)
        mp.spawn(  # type: ignore[attr-defined,no-untyped-call]  # torch leaves it untyped
            run_rank, args=(free_port(), answer, work), nprocs=2
        )
        found: Measured = answer.get()
        sizes = [f"{size:.0f} MiB" for size in (found.parameters, found.gradients, found.optimizer, found.peak)]
        table.add_row(case.label, *sizes, f"{found.step * 1000:.0f} ms")
    console.print(
        f"model: {options.depth * block_size * 4 / MIB:.0f} MiB in {options.depth} blocks of equal size; rank 0 of 2"
    )
    console.print(table)


if __name__ == "__main__":
    main()
