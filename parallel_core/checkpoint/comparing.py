"""What differs between two checkpoints: tensors, read a bounded part at a time, and all that is no tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel_core.checkpoint.distance import Distance
from parallel_core.checkpoint.manifest import RANDOM_STATES, Manifest, SavedTensor, Section
from parallel_core.checkpoint.opening import Saved, check_sizes, hash_of
from parallel_core.checkpoint.optimizer_values import OptimizerValues
from parallel_core.checkpoint.reading import SavedReader
from parallel_core.checkpoint.safetensors_format import TensorInfo
from parallel_core.checkpoint.tensor_bytes import CHUNK, runs_of
from parallel_core.checkpoint.tree import decode, decode_each
from parallel_core.checkpoint.verifying import Told, nobody

_STEP = CHUNK // 4  # bytes of each; what is computed with them takes several times as much


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same.

    Attributes:
        part: `model`, `optimizer` or `objects`.
        name: the tensor's.
        one, other: its dtype and shape; None where there is no such tensor.
        distance: how far the elements are apart; None where the shapes differ.
    """

    part: str
    name: str
    one: TensorInfo | None
    other: TensorInfo | None
    distance: Distance | None = None

    @property
    def order(self) -> tuple[bool, bool, float]:
        """What to sort by: the model before the rest, whose step counts would hide it, then the largest difference.

        A tensor that lacks is the largest of all.
        """
        largest = math.nan if self.distance is None else self.distance.largest
        return self.part != "model", self.distance is not None, -math.inf if math.isnan(largest) else -largest


@dataclass(frozen=True)
class ValueDifference:
    """A value that is not the same: where it stands, and what it is; None where there is none.

    Attributes:
        place: such as `optimizer.param_groups[0].lr`.
        one, other: as Python writes it.
    """

    place: str
    one: str | None
    other: str | None


@dataclass
class Comparison:
    """What differs.

    Attributes:
        tensors: the largest difference first.
        values: in the order in which they stand in the manifest.
        compared: how many tensors there are in either.
    """

    tensors: list[TensorDifference] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    compared: int = 0

    @property
    def is_same(self) -> bool:
        """Whether nothing differs, not in a bit."""
        return not self.tensors and not self.values


def compare(one: Saved, other: Saved, *, model_only: bool = False, told: Told = nobody) -> Comparison:
    """Compare what two checkpoints would load. How they are cut into files, and who saved them, makes no difference.

    Args:
        one, other: checkpoints, or weights from elsewhere.
        model_only: whether to leave out the optimizer, the objects, the random states and the extra data.
        told: is called as tensors are read.

    Raises:
        CheckpointError: a file can't be read, or has another size than when it was saved.
    """
    check_sizes(one)
    check_sizes(other)
    result = Comparison(values=list(_values(one.manifest, other.manifest, model_only=model_only)))
    if not model_only:
        result.values += _random_states(one, other)
    pairs = [
        (part, name, mine, yours)
        for part, first, second in _sections(one.manifest, other.manifest, model_only=model_only)
        for name, mine, yours in _pairs(first, second)
    ]
    result.compared = len(pairs)
    done, total = 0, sum(mine[1].nbytes for _, _, mine, yours in pairs if mine is not None and yours is not None)
    with SavedReader(one) as first_reader, SavedReader(other) as second_reader:
        for part, name, mine, yours in pairs:
            if mine is None or yours is None or mine[1].shape != yours[1].shape:
                result.tensors.append(TensorDifference(part, name, _info(mine), _info(yours)))
                continue
            distance = Distance()
            larger = max(mine[1], yours[1], key=lambda each: each.nbytes)
            for run in runs_of(larger, _STEP):
                distance.add(first_reader.run(*mine, run), second_reader.run(*yours, run))
            if distance.count or mine[1].dtype != yours[1].dtype:
                result.tensors.append(TensorDifference(part, name, _info(mine), _info(yours), distance))
            done += mine[1].nbytes
            told(done, total)
    result.tensors.sort(key=lambda each: each.order)
    return result


_Named = tuple[str, SavedTensor]
"""A tensor, and the name under which it lies in the files."""


def _info(named: _Named | None) -> TensorInfo | None:
    return None if named is None else TensorInfo(named[1].dtype, named[1].shape)


def _sections(
    one: Manifest, other: Manifest, *, model_only: bool
) -> Iterator[tuple[str, dict[str, _Named], dict[str, _Named]]]:
    yield "model", _with_ties(one), _with_ties(other)
    # Where only one of them has an optimizer, the values say so once.
    if not model_only and one.optimizer is not None and other.optimizer is not None:
        yield "optimizer", _plain(one.optimizer), _plain(other.optimizer)
    if not model_only:
        yield "objects", _plain(one.objects), _plain(other.objects)


def _plain(section: Section) -> dict[str, _Named]:
    return {name: (name, tensor) for name, tensor in section.tensors.items()}


def _with_ties(manifest: Manifest) -> dict[str, _Named]:
    """Return the model's tensors under all their names: which of them a tied one lies under makes no difference."""
    found = _plain(manifest.model)
    for group in manifest.tied:
        if (first := found.get(group[0])) is not None:
            found |= {again: first for again in group[1:] if again not in found}
    return found


def _pairs(
    first: Mapping[str, _Named], second: Mapping[str, _Named]
) -> Iterator[tuple[str, _Named | None, _Named | None]]:
    """Yield what is to be compared: each two tensors once, under however many names."""
    seen = set()
    for name in dict.fromkeys((*first, *second)):
        mine, yours = first.get(name), second.get(name)
        key = (mine and mine[0], yours and yours[0])
        if key not in seen:
            seen.add(key)
            yield name, mine, yours


def _values(one: Manifest, other: Manifest, *, model_only: bool) -> Iterator[ValueDifference]:
    yield from _differing("model", *(decode_each(each.model.values, _there) for each in (one, other)))
    if model_only:
        return
    if one.optimizer is None or other.optimizer is None:
        classes = [each.origin.optimizer if each.optimizer is not None else None for each in (one, other)]
        if one.optimizer is not other.optimizer:
            yield ValueDifference("optimizer", *classes)
    else:
        found = [OptimizerValues.of(each.values).decoded(_there) for each in (one.optimizer, other.optimizer)]
        yield from _differing("optimizer", *found)
    yield from _differing("objects", *(decode_each(each.objects.values, _there) for each in (one, other)))
    yield from _differing("extra", decode(one.extra), decode(other.extra))


def _there(_name: str) -> str:
    """Stand for a tensor: that there is one is compared with the values, the tensor itself by the files."""
    return "<tensor>"


def _differing(place: str, one: Any, other: Any) -> Iterator[ValueDifference]:
    """Yield where two values of plain data differ."""
    if type(one) is type(other) and isinstance(one, dict):
        for key in dict.fromkeys((*one, *other)):
            inner = f"{place}.{key}" if isinstance(key, str) and key.isidentifier() else f"{place}[{key!r}]"
            if key in one and key in other:
                yield from _differing(inner, one[key], other[key])
            else:
                yield ValueDifference(
                    inner, repr(one[key]) if key in one else None, repr(other[key]) if key in other else None
                )
    elif type(one) is type(other) and isinstance(one, list | tuple) and len(one) == len(other):
        for index, (mine, yours) in enumerate(zip(one, other, strict=True)):
            yield from _differing(f"{place}[{index}]", mine, yours)
    elif repr(one) != repr(other):  # as text, NaN is what it is, 1 is not True, and 0.0 is not -0.0
        yield ValueDifference(place, repr(one), repr(other))


def _random_states(one: Saved, other: Saved) -> Iterator[ValueDifference]:
    hashes = [hash_of(each.folder / RANDOM_STATES) if each.manifest.random_states else None for each in (one, other)]
    if hashes[0] != hashes[1]:
        first, second = (None if found is None else f"sha256 {found[:12]}" for found in hashes)
        yield ValueDifference("random states", first, second)
