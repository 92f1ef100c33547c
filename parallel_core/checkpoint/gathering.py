"""Whole tensors in one file on rank 0, while no rank ever holds more of them than a few pieces of bounded size."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from parallel_core import ranks
from parallel_core.checkpoint.job import Job
from parallel_core.checkpoint.manifest import SavedFile
from parallel_core.checkpoint.safetensors_format import TensorInfo
from parallel_core.checkpoint.tensor_bytes import dtype_named, in_a_row, in_dtype, memory
from parallel_core.checkpoint.writing import TensorFile, empty_bytes, steps
from parallel_core.errors import CheckpointError
from parallel_core.local_shards import Overlap, Region, overlaps

AGREE_EVERY = 256 * 2**20  # bytes, after which a rank that has failed tells the others


def write_whole(
    job: Job,
    part: str,
    folder: Path,
    files: Mapping[str, Mapping[str, TensorInfo]],
    *,
    metadata: Mapping[str, str],
) -> list[SavedFile]:
    """Write the tensors of one part whole into files on rank 0, from what all ranks hold of them; a collective.

    Args:
        job: the save; its group has a backend for the CPU.
        part: the name of the part.
        folder: where to.
        files: which tensors go into which file.
        metadata: what is noted in each file besides.

    Returns:
        the files on rank 0, nothing on the others.

    Raises:
        CheckpointError: it failed on a rank; the same error on every rank.
    """
    # A rank that fails goes on taking part until the ranks next agree: the others wait for what it sends or takes.
    exchange = _Exchange(job, part)
    written: list[SavedFile] = []
    problem: Exception | None = None
    since = 0
    for name, infos in files.items():
        with ExitStack() as stack:
            file: TensorFile | None = None
            if job.rank == 0 and problem is None:
                try:
                    file = stack.enter_context(
                        TensorFile(folder / name, infos, checksum=job.options.checksum, metadata=metadata)
                    )
                except Exception as error:
                    problem = error
            for tensor, region in steps(infos):
                data, failure = exchange.run_of(tensor, region)
                problem = problem or failure
                if file is not None and problem is None:
                    try:
                        file.write(memory(data))
                    except Exception as error:
                        problem = error
                since += region.numel * dtype_named(infos[tensor].dtype).itemsize
                if since >= AGREE_EVERY:
                    ranks.agree(problem, CheckpointError, job.group)
                    since = 0
            if file is not None and problem is None:
                try:
                    written.append(file.finish())
                except Exception as error:
                    problem = error
    ranks.agree(problem, CheckpointError, job.group)
    return written


class _Exchange:
    """Brings runs of whole tensors to rank 0."""

    def __init__(self, job: Job, part: str) -> None:
        self._tensors = job.plans[part]
        self._shards = job.parts[part].shards
        self._group = job.group
        self._rank = job.rank
        self._name = ""
        self._elements = torch.empty(0)

    def run_of(self, name: str, run: Region) -> tuple[torch.Tensor, Exception | None]:
        """Return the bytes of a run of a tensor on rank 0, and what went wrong with this rank's part of it."""
        tensor = self._tensors[name]
        dtype = dtype_named(tensor.info.dtype)
        mine = self._rank
        data = empty_bytes(run.numel * dtype.itemsize if mine == 0 else 0)
        problem: Exception | None = None
        for owner, region in tensor.pieces:
            if mine not in (0, owner):
                continue
            common = list(overlaps(run, region))
            if not common:
                continue
            part = empty_bytes(sum(each.length for each in common) * dtype.itemsize)
            if mine == owner:
                try:
                    self._fill(part, name, common, dtype)
                except Exception as error:
                    problem = error
            if owner != 0:
                with ranks.in_contact():
                    if mine == 0:
                        dist.recv(part, owner, group=self._group)
                    else:
                        dist.send(part, 0, group=self._group)
            if mine == 0:
                _scatter(part, data, common, dtype.itemsize)
        return data, problem

    def _fill(self, part: torch.Tensor, name: str, common: list[Overlap], dtype: torch.dtype) -> None:
        if self._name != name:
            self._name, self._elements = name, in_a_row(self._shards[name].tensor)
        end = 0
        for each in common:
            elements = in_dtype(name, self._elements[each.second : each.second + each.length].cpu(), dtype)
            part[end : (end := end + each.length * dtype.itemsize)] = ranks.bits(elements)


def _scatter(part: torch.Tensor, data: torch.Tensor, common: list[Overlap], itemsize: int) -> None:
    end = 0
    for each in common:
        start, count = each.first * itemsize, each.length * itemsize
        data[start : start + count] = part[end : (end := end + count)]
