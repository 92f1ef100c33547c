"""Train a small language model on the bytes of any text, on as many devices as there are.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py --output runs/mine
    python examples/train_lm.py --output runs/mine     # on one process; and it goes on where the last run stopped

How the ranks share the work is one word in the config file, `parallel_strategy`. Nothing below depends on it: the loop
is that of any PyTorch script, and runs as it is under every strategy, and under none. A run that was stopped can go on
under another one.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import torch
import torch.nn.functional as F
from byte_lm import ByteLM, draw_batch, read_text, write_text
from display import parameter_table, progress
from rich.console import Console
from torch import nn
from torch.distributed.tensor import DTensor

from parallel_core import (
    ParallelCoreError,
    clip_grad_norm,
    data_parallel,
    grad_scaler,
    latest_checkpoint,
    load_checkpoint,
    load_config,
    no_sync,
    process_group,
    ranks,
    save_checkpoint,
    wrap_model_for_training,
    wrap_optimizer,
)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train, save, write a sample; return the loss of each step."""
    args = parse(arguments)
    config = load_config(args.config, overrides=args.overrides)
    with process_group(config) as group:  # torchrun's ranks, or just this process
        # What is said once is said by rank 0, and as it is: a sample may look like markup.
        console = Console(quiet=group.rank != 0, markup=False, emoji=False, highlight=False)
        text = read_text(args.data, args.max_bytes)
        if len(text) <= args.context:
            refuse(group.rank, f"{args.data} has {len(text)} bytes of text, and a context of {args.context} needs more")

        torch.manual_seed(args.seed)
        model: nn.Module = ByteLM(args.width, args.depth, args.heads, args.context)
        whole = sum(parameter.numel() for parameter in model.parameters())
        wrapped = wrap_model_for_training(model, config, device=group.device)
        model = wrapped or model.to(group.device)  # one process needs no strategy
        optimizer = wrap_optimizer(model, torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95)))
        scaler = grad_scaler(model)
        held = ranks.all_gather((str(group.device), held_parameters(model)))
        console.print(parameter_table(config.parallel_strategy if wrapped else "none", whole, held))

        index, count = data_parallel(model)
        if rest := args.batch % (pieces := count * args.micro_batches):
            problem = f"--batch {args.batch} can't be cut into {count} shares of {args.micro_batches} micro-batches"
            refuse(group.rank, f"{problem}; {args.batch - rest + pieces} can")
        run = args.output or ranks.broadcast(Path("runs", time.strftime("%Y-%m-%d-%H%M%S")))
        first_step, first_loss = 0, 0.0
        if latest := latest_checkpoint(run):
            extra = load_checkpoint(latest, model, optimizer, objects={"scaler": scaler}).extra
            if not isinstance(extra, dict) or not {"step", "first_loss"} <= extra.keys():
                refuse(group.rank, f"{latest} is not from this script; another --output starts a new run")
            first_step, first_loss = extra["step"], extra["first_loss"]
            console.print(f"going on from {latest}; another --output starts a new run", soft_wrap=True)
        if first_step >= args.steps:
            console.print(f"nothing to train: the run has {first_step} steps; give more --steps than that")

        losses: list[float] = []
        steps = range(first_step, args.steps)
        with progress(console, steps, args.report_every) as report:
            for step in steps:
                # The batch depends on the step alone: not on the number of ranks, nor on where the run began.
                batch = draw_batch(text, size=args.batch, context=args.context, seed=args.seed, step=step)
                micro_batches = batch[index::count].to(group.device).chunk(args.micro_batches)
                set_learning_rate(optimizer, args.learning_rate, step)
                loss = train_step(model, optimizer, scaler, micro_batches, args.clip)
                losses.append(sum(ranks.all_gather(loss)) / group.world_size)
                report(step, losses[-1], batch[:, 1:].numel())
                first_loss = first_loss or losses[-1]
                is_last = step + 1 == args.steps
                if is_last or (step + 1) % args.save_every == 0:
                    latest = save_checkpoint(
                        run / f"step-{step + 1:06}",
                        model,
                        optimizer,
                        state_dict_type=args.state_dict_type if is_last else "sharded",  # the quick kind on the way
                        objects={"scaler": scaler},
                        extra={"step": step + 1, "first_loss": first_loss},
                        keep_last=args.keep_last,
                    ).path

        # On every rank, because a forward pass may need them all.
        sample = write_text(
            model, args.prompt, length=args.sample, context=args.context, device=group.device, seed=args.seed
        )
        console.rule("a sample")
        console.print(sample)
        console.rule()
        if losses:
            last_loss = sum(losses[-10:]) / len(losses[-10:])
            console.print(f"saved in {latest}", soft_wrap=True)
            console.print(f"loss {first_loss:.2f} -> {last_loss:.2f} ({last_loss / first_loss:.0%} of its start)")
    return losses


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    micro_batches: Sequence[torch.Tensor],
    max_norm: float,
) -> float:
    """Take one step on this rank's share of a batch, and return the share's mean loss."""
    total = torch.zeros((), device=micro_batches[0].device)
    for number, windows in enumerate(micro_batches, start=1):
        # The ranks average their gradients once a step, in the last of its backward passes.
        with no_sync(model) if number < len(micro_batches) else nullcontext():
            logits = model(windows[:, :-1]).float()  # the loss in fp32, whatever the model computes in
            loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) / len(micro_batches)
            scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    clip_grad_norm(model, max_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return total.item()


def set_learning_rate(optimizer: torch.optim.Optimizer, peak: float, step: int, warmup: int = 30) -> None:
    """Rise to the peak, then fall with the square root of the step: the same for a run of any length."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


def held_parameters(model: nn.Module) -> int:
    """Return how many of the model's parameters lie on this rank."""
    return sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())


def refuse(rank: int, problem: str) -> NoReturn:
    """End all ranks with a problem that each of them has found; one says it."""
    sys.exit(problem if rank == 0 else 1)


def number(least: int) -> Callable[[str], int]:
    """Return what reads a whole number of the command line, from `least` on."""

    def read(text: str) -> int:
        if not text.isdecimal() or len(text) > 12 or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, found {text!r}")
        return int(text)

    return read


def amount(text: str) -> float:
    """Read a finite number of the command line, above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, found {text!r}")
    return value


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line's arguments; the strategy is the last of the overrides."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="setting=value", help="overrides the config file")
    add("--config", type=Path, default=Path(__file__).with_name("parallel.toml"), help="how the ranks share the work")
    add("--strategy", help="overrides the config file's parallel_strategy")
    add("--data", type=Path, default=Path(os.__file__).parent, help="any file or folder of text")
    add("--max-bytes", type=number(1), default=4_000_000, help="read no more of it")
    add("--output", type=Path, help="the run's folder; a run that is there goes on; a new one in runs/ if not given")
    add("--save-every", type=number(1), default=50, help="steps")
    add("--keep-last", type=number(1), default=2, help="checkpoints of the run")
    add("--state-dict-type", choices=["full", "sharded"], default="full", help="of the last checkpoint")
    add("--width", type=number(1), default=128, help="of the model")
    add("--depth", type=number(0), default=4, help="blocks")
    add("--heads", type=number(1), default=4, help="of attention")
    add("--context", type=number(1), default=64, help="bytes that the model sees")
    add("--steps", type=number(0), default=150, help="in all, those before a stop included")
    add("--batch", type=number(1), default=32, help="windows of text a step, over all ranks")
    add("--micro-batches", type=number(1), default=2, help="backward passes a step")
    add("--learning-rate", type=amount, default=3e-3, help="at its peak")
    add("--clip", type=amount, default=1.0, help="the largest norm of the gradients")
    add("--seed", type=number(0), default=0, help="of the weights, the data's order and the sample")
    add("--report-every", type=number(1), default=25, help="steps, where no terminal shows a bar")
    add("--prompt", type=str.encode, default="def ", help="the beginning of the sample")
    add("--sample", type=number(0), default=300, help="bytes to write in the end")
    args = parser.parse_intermixed_args(arguments)
    args.overrides += [] if args.strategy is None else [f"parallel_strategy={args.strategy}"]
    if not args.data.exists():
        parser.error(f"--data {args.data}: no such file or folder")
    if args.width % args.heads:
        parser.error(f"--heads {args.heads} does not divide --width {args.width}")
    if args.output and args.output.exists() and not args.output.is_dir():
        parser.error(f"--output {args.output}: expected a folder, found a file")
    if not args.prompt:
        parser.error("--prompt: expected some text to begin with, found none")
    return args


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except ParallelCoreError as error:
        # In one piece: each rank says it, as one may be alone with what it has found.
        sys.stderr.write(f"rank {os.environ.get('RANK', '0')}: {error}\n")
        sys.exit(1)
