"""Whether a checkpoint fits a model and its optimizer: found before anything changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from parallel_core.checkpoint.manifest import SavedTensor
from parallel_core.checkpoint.opening import Saved
from parallel_core.checkpoint.optimizer_values import OptimizerValues
from parallel_core.checkpoint.reading import SavedReader
from parallel_core.checkpoint.safetensors_format import TensorInfo
from parallel_core.checkpoint.tensor_bytes import dtype_named
from parallel_core.checkpoint.tree import tensor_names_of_each
from parallel_core.dtypes import dtype_name
from parallel_core.errors import CheckpointError
from parallel_core.optimizer_state_dicts import Wanted, optimizer_problems
from parallel_core.record import Layout
from parallel_core.state_dicts import SHOWN, converts, named


class Match(NamedTuple):
    """What of a checkpoint goes where in a model.

    Attributes:
        sources: the name that each tensor of the model is saved under; a tied tensor's for its first name alone.
        missing, unexpected: names that the checkpoint lacks, and names that the model lacks.
        converted: the dtypes, saved and the model's, of each tensor of the model for which they differ.
    """

    sources: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    converted: dict[str, tuple[str, str]]

    def state_dtype(self, name: str, info: TensorInfo) -> torch.dtype:
        """Return the dtype of a tensor of the optimizer's state for a parameter: its own, or converted with the weight.

        It is where it had the weight's dtype, as an optimizer makes it by default; but a single number, such as a step
        count, has a dtype of its own.
        """
        saved, wanted = self.converted.get(name, ("", ""))
        return dtype_named(wanted if info.dtype == saved and info.shape else info.dtype)


def match(layout: Layout, saved: Saved, reader: SavedReader, *, strict: bool, cast: bool) -> Match:
    """Compare a checkpoint with the model's layout. No collective: every rank finds the same.

    Raises:
        CheckpointError: they don't fit.
    """
    tensors = saved.manifest.model.tensors
    saved_as = {name: name for name in tensors}
    for group in saved.manifest.tied:
        saved_as |= {name: group[0] for name in group[1:] if name not in tensors and group[0] in tensors}
    first_of = {name: group[0] for group in layout.tied for name in group}
    groups = {group[0]: group for group in layout.tied}
    extra = saved.manifest.model.values or {}
    of_extra = set(tensor_names_of_each(extra))
    sources: dict[str, str] = {}
    converted: dict[str, tuple[str, str]] = {}
    missing: list[str] = []
    problems: list[str] = []
    for name, spec in layout.entries.items():
        if spec is None:
            missing += [name] if name not in extra else []
            continue
        if first_of.get(name, name) != name:
            continue
        names = groups.get(name, (name,))
        found = list(dict.fromkeys(saved_as[each] for each in names if each in saved_as))
        if not found:
            missing += names
            continue
        sources[name] = found[0]
        info = TensorInfo(dtype_name(spec.dtype), spec.shape)
        if tensors[found[0]].dtype != info.dtype:
            converted[name] = tensors[found[0]].dtype, info.dtype
        problems += _problems(name, info, tensors, found, reader, cast=cast)
    unexpected = [name for name in (*saved_as, *extra) if name not in layout.entries and name not in of_extra]
    missing = [name for name in layout.entries if name in set(missing)]
    if strict:
        lists = {"missing keys": missing, "unexpected keys": unexpected}
        problems = [named(what, keys) for what, keys in lists.items() if keys] + problems
    if problems:
        raise CheckpointError(_text(f"the checkpoint {saved.place} does not fit the model", problems))
    return Match(sources, missing, unexpected, converted)


def check_optimizer(wanted: Wanted, saved: Saved) -> None:
    """Make sure that the saved state of an optimizer fits this one.

    Raises:
        CheckpointError: it doesn't, or none was saved.
    """
    section = saved.manifest.optimizer
    if section is None:
        raise CheckpointError(f"the checkpoint {saved.place} has no state of an optimizer; load the model alone")

    def outline(name: str) -> torch.Tensor:
        info = section.tensors[name]
        return torch.empty(info.shape, dtype=dtype_named(info.dtype), device="meta")

    decoded = OptimizerValues.of(section.values).decoded(outline)
    problems = list(optimizer_problems(wanted, decoded))
    if lacking := [
        name for name in decoded["state"] if name in wanted.layout.parameters and name not in wanted.layout.entries
    ]:
        problems.append(named("state of parameters that the state dict of the model leaves out", lacking))
    if problems:
        raise CheckpointError(_text(f"the checkpoint {saved.place} does not fit the optimizer", problems))


def _problems(
    name: str,
    spec: TensorInfo,
    saved: Mapping[str, SavedTensor],
    found: list[str],
    reader: SavedReader,
    *,
    cast: bool,
) -> Iterator[str]:
    """Yield what is wrong with the saved tensors that a tensor of the model may be loaded from."""
    for each in found:
        info = saved[each]
        if info.shape != spec.shape:
            yield f"{name!r}: wrong shape: the model has {spec}, the checkpoint {info}"
        elif info.dtype != spec.dtype and not (cast and converts(dtype_named(info.dtype), dtype_named(spec.dtype))):
            hint = "; cast=True converts" if converts(dtype_named(info.dtype), dtype_named(spec.dtype)) else ""
            yield f"{name!r}: wrong dtype: the model has {spec}, the checkpoint {info}{hint}"
        elif each != found[0] and not reader.same(found[0], saved[found[0]], each, info):
            yield (
                f"{found[0]!r} and {each!r} are one parameter of the model and have different values in the checkpoint"
            )


def _text(what: str, problems: list[str]) -> str:
    shown = problems[:SHOWN]
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return f"{what}: {problems[0]}" if len(problems) == 1 else "\n  - ".join([f"{what}:", *shown, *more])
