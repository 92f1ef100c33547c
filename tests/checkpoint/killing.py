"""A program that saves without end on two ranks, kills them at random moments, and loads what there is.

Prints, as JSON, one line for each round: what was found after it. The ranks are forked from this process, which has
imported torch and started no thread: fresh ones would need seconds each.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import parallel_core
from parallel_core import CheckpointError

WORLD_SIZE = 2
PATIENCE = 20.0  # seconds that the rank which is left may need to notice


def model_at(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and an optimizer all of whose numbers are the step's."""
    model = nn.Sequential(*(nn.Linear(160, 160) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        nn.init.constant_(parameter, step)
        optimizer.state[parameter] = {
            "step": torch.tensor(float(step)),
            **{key: torch.full_like(parameter, step) for key in ("exp_avg", "exp_avg_sq")},
        }
    return model, optimizer


def save_without_end(rank: int, folder: Path, first: int, kind: str) -> None:
    """Save one step after the other, every other one in the place of the one before."""
    meeting_point = str(folder.parent / f"store-{first}-{kind}")
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(meeting_point, WORLD_SIZE),  # type: ignore[attr-defined]  # not in its __all__
        rank=rank,
        world_size=WORLD_SIZE,
        timeout=timedelta(seconds=60),
    )
    for step in range(first, first + 10_000):
        model, optimizer = model_at(step)
        parallel_core.save_checkpoint(
            folder / f"step-{step // 2:06}",
            model,
            optimizer,
            state_dict_type=kind,
            extra={"step": step},
            keep_last=2,
            checksum=False,
        )
        (folder.parent / f"saving-{rank}").write_text(str(step))
        (folder.parent / f"saving-{rank}").rename(folder.parent / f"saved-{rank}")  # a kill may come in between


def forked(rank: int, folder: Path, first: int, kind: str) -> int:
    """Start a rank, and return its process."""
    if pid := os.fork():
        return pid
    code = 0
    try:
        save_without_end(rank, folder, first, kind)
    except CheckpointError:
        code = 3
    except BaseException:
        traceback.print_exc()
        code = 4
    finally:
        os._exit(code)


def killed(pids: list[int], victims: list[int]) -> list[int]:
    """Kill some ranks, wait for the others, and return how each ended."""
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def found(folder: Path) -> dict[str, object]:
    """Load the last complete checkpoint, and return what is in it."""
    latest = parallel_core.latest_checkpoint(folder)
    if latest is None:
        return {"step": None, "alike": True}
    model, optimizer = model_at(-1)
    step = parallel_core.load_checkpoint(latest, model, optimizer).extra["step"]
    numbers = [*model.parameters(), *(value for entries in optimizer.state.values() for value in entries.values())]
    return {"step": step, "alike": all(bool((number == step).all()) for number in numbers)}


def main(folder: Path, rounds: int) -> None:
    """Kill one rank, and all ranks, at random moments of saves of both kinds."""
    draw = random.Random(0)
    first = 0
    for number in range(rounds):
        kind = ("full", "sharded")[number % 2]
        victims = [[0], [1], [0, 1], [0, 1]][number // 2 % 4]
        pids = [forked(rank, folder, first, kind) for rank in range(WORLD_SIZE)]
        mark = folder.parent / "saved-0"
        mark.unlink(missing_ok=True)
        while not mark.exists():
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.2))
        codes = killed(pids, victims)
        saved = int((folder.parent / "saved-0").read_text())
        result = found(folder)
        print(json.dumps({"kind": kind, "victims": victims, "codes": codes, "saved": saved, **result}), flush=True)
        first = max(first, saved) + 2
    parallel_core.save_checkpoint(folder / "last", *model_at(first), extra={"step": first}, keep_last=1)
    print(json.dumps({"left": sorted(path.name for path in folder.iterdir())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
