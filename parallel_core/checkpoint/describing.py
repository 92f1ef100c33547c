"""What is in a checkpoint, as tables of text for people to read; without torch."""

from __future__ import annotations

import datetime as dt
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rich.filesize import decimal

from parallel_core.checkpoint.manifest import Section
from parallel_core.checkpoint.opening import Saved, header_of
from parallel_core.checkpoint.optimizer_values import OptimizerValues
from parallel_core.checkpoint.tree import TENSOR, decode
from parallel_core.strategy_config import CORE_FIELDS

SHOWN = 20
"""Rows of a table before those that are alike become one."""

_LONGEST = 200  # characters of a value
_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")  # a whole part of a tensor's name: the 3 of layers.3.weight


class Part(NamedTuple):
    """A table.

    Attributes:
        title: what it is about.
        header: of its columns; empty where they need none.
        rows: a text for each column.
    """

    title: str
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def describe(saved: Saved, *, every: bool = False) -> list[Part]:
    """Return what lies on the disk.

    Args:
        saved: a checkpoint, or weights from elsewhere.
        every: whether each tensor and file has a row, however many there are.
    """
    manifest = saved.manifest
    parts = [Part("", (), list(_facts(saved, every=every))), _files(saved, every=every)]
    parts.append(_tensors("the model", manifest.model, every=every))
    if manifest.optimizer is not None:
        parts += _optimizer(manifest.optimizer)
        parts += [_tensors("the optimizer", manifest.optimizer, every=every)] if every else []
    if manifest.objects.tensors:
        parts.append(_tensors("the objects", manifest.objects, every=every))
    return parts


def cut(text: str) -> str:
    """Return the beginning of a long text, with its length."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"


def counted(number: int, what: str) -> str:
    """Return `1 file`, or `2 000 files`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}".replace(",", " ")


def _facts(saved: Saved, *, every: bool) -> Iterator[tuple[str, str]]:
    manifest, origin = saved.manifest, saved.manifest.origin
    yield "path", str(saved.place)
    if not saved.is_checkpoint:
        yield "kind", "weights without a manifest"
        for file in manifest.files:
            if metadata := header_of(saved.folder / file.name).metadata:
                yield f"metadata of {file.name}", json.dumps(metadata, ensure_ascii=False)
    else:
        yield "kind", f"{manifest.state_dict_type} checkpoint"
        yield "saved at", f"{dt.datetime.fromtimestamp(manifest.saved_at, dt.UTC):%Y-%m-%d %H:%M:%S} UTC"
        yield "saved by", f"{origin.strategy}, {counted(manifest.world_size, 'rank')}"
        yield "versions", ", ".join(f"{name} {version}" for name, version in origin.versions.items())
        own = (*CORE_FIELDS, f"{origin.config.get('parallel_strategy')}_")
        shown = [name for name in origin.config if every or name.startswith(own)]
        for index, name in enumerate(shown):
            yield "" if index else "config", f"{name} = {json.dumps(origin.config[name])}"
    yield "size", f"{decimal(manifest.nbytes)} in {counted(len(manifest.files), 'file')}"
    yield "model", _sum(manifest.model)
    for group in manifest.tied:
        yield "tied", " = ".join(map(repr, group))
    if saved.is_checkpoint:
        yield "optimizer", f"{origin.optimizer}: {_sum(manifest.optimizer)}" if manifest.optimizer else "none"
        yield "objects", ", ".join(map(repr, manifest.objects.values or ())) or "none"
        yield "random states", f"of {counted(manifest.world_size, 'rank')}" if manifest.random_states else "none"
        extra = repr(decode(manifest.extra))
        yield "extra", extra if every else cut(extra)


def _files(saved: Saved, *, every: bool) -> Part:
    files = saved.manifest.files
    header = ("file", "count", "size", "sha256")
    if every or len(files) <= SHOWN:
        rows = [(file.name, "1", decimal(file.size), (file.sha256 or "none")[:12]) for file in files]
    else:
        sizes: dict[str, list[int]] = {}
        for file in files:
            sizes.setdefault(re.sub(r"\d+", "*", file.name), []).append(file.size)
        rows = [(name, str(len(found)), decimal(sum(found)), "") for name, found in sizes.items()]
    return Part("files", header, rows)


def _tensors(title: str, section: Section, *, every: bool) -> Part:
    """Return a section's tensors; where there are many, those that differ in the number of a layer alone are a row."""
    alike: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for name, tensor in section.tensors.items():
        is_long = not every and len(section.tensors) > SHOWN
        key = _NUMBER.sub("*", name) if is_long else name
        alike.setdefault((key, tensor.dtype, tensor.shape), []).append(name)
    rows = []
    for (key, dtype, shape), names in alike.items():
        found = [section.tensors[name] for name in names]
        pieces = sorted({len(tensor.pieces) for tensor in found})
        cut = str(pieces[0]) if len(pieces) == 1 else f"{pieces[0]} to {pieces[-1]}"
        name = names[0] if len(names) == 1 else key
        name = name if name and name == name.strip() else repr(name)  # one that begins with a space can be seen
        size = decimal(sum(tensor.nbytes for tensor in found))
        rows.append((name, str(len(names)), dtype, str(list(shape)), size, cut))
    header = ("tensor", "count", "dtype", "shape", "size", "pieces")
    return Part(f"tensors of {title}", header, rows)


def _optimizer(section: Section) -> list[Part]:
    values = OptimizerValues.of(section.values)
    groups = []
    for index, options in enumerate(values.groups(lambda name: f"<tensor {name}>")):
        parameters = options.pop("params")
        groups.append((str(index), str(len(parameters)), ", ".join(f"{key}={options[key]!r}" for key in options)))
    kinds: dict[tuple[str, str], list[int]] = {}
    for entries in values.state.values():
        for key, node in entries.items():
            name = node.get(TENSOR) if isinstance(node, dict) else None
            tensor = section.tensors.get(name) if isinstance(name, str) else None
            dtype, nbytes = (tensor.dtype, tensor.nbytes) if tensor is not None else ("no tensor", 0)
            kinds.setdefault((key, dtype), []).append(nbytes)
    rows = [(key, str(len(sizes)), dtype, decimal(sum(sizes))) for (key, dtype), sizes in kinds.items()]
    return [
        Part("groups of the optimizer", ("group", "parameters", "options"), groups),
        Part("state of the optimizer", ("key", "count", "dtype", "size"), rows),
    ]


def _sum(section: Section) -> str:
    tensors = section.tensors.values()
    elements = sum(math.prod(tensor.shape) for tensor in tensors)
    dtypes = _listed(dict.fromkeys(tensor.dtype for tensor in tensors))
    size = decimal(sum(tensor.nbytes for tensor in tensors))
    return f"{counted(len(tensors), 'tensor')}, {counted(elements, 'element')}, {size}{dtypes}"


def _listed(names: Iterable[str]) -> str:
    return "".join(f", {name}" for name in names)
