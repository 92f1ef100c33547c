"""What a rank holds at most, in the memory of its own process."""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import parallel_core
from parallel_core import DistributedConfig
from parallel_core.testing import Ranks

pytest.importorskip("parallel_core_ddp", reason="needs parallel-core-ddp, which is not installed")
pytest.importorskip("parallel_core_fsdp2", reason="needs parallel-core-fsdp2, which is not installed")

M_MMAP_THRESHOLD = -3  # of mallopt, as glibc has it; a number that was set is not moved any more


def peak(strategy: str) -> float:
    """Train a model of 200 MB for a step with AdamW; return the most MiB that this process took for all of it.

    Counted is resident memory from before the model is built, so that building, wrapping and training all count, and
    whatever torch and gloo keep beside the tensors does too. The C library is told to give back what is freed: by
    itself it keeps what was gathered, unit by unit, in pieces, several times over, which is its own affair. Values are
    not drawn, which would only take time.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 2**17)
    libc.malloc_trim(0)  # so that what earlier tests have freed is not used again unseen
    Path("/proc/self/clear_refs").write_text("5")  # starts the peak from here
    status = Path("/proc/self/status").read_text
    before = memory_line(status(), "VmRSS")
    layers = [nn.utils.skip_init(nn.Linear, 1024, 1024, bias=False) for _ in range(50)]
    model: nn.Module = nn.Sequential(*layers)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 1e-3)
    options = {"fsdp2_mixed_precision": "fp32", "fsdp2_wrap_layers": ("Linear",)} if strategy == "fsdp2" else {}
    config = DistributedConfig(parallel_strategy=strategy, **options)
    wrapped = parallel_core.wrap_model_for_training(model, config)
    assert wrapped is not None
    optimizer = parallel_core.wrap_optimizer(wrapped, torch.optim.AdamW(wrapped.parameters()))
    wrapped(torch.ones(4, 1024)).sum().backward()
    optimizer.step()
    return (memory_line(status(), "VmHWM") - before) / 1024


def memory_line(status: str, name: str) -> int:
    """Return a line of /proc/self/status, in KiB."""
    return int(next(line for line in status.splitlines() if line.startswith(name)).split()[1])


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's own account of a process")
def test_a_rank_of_four_takes_less_than_45_percent_of_what_ddp_takes_under_fsdp2(ranks: Ranks) -> None:
    whole = min(ranks(peak, "ddp", world_size=4, timeout=120))
    shares = ranks(peak, "fsdp2", world_size=4, timeout=120)
    assert whole > 4 * 200  # parameters, gradients, and two values of AdamW's for each parameter
    assert max(shares) < 0.45 * whole, (shares, whole)
