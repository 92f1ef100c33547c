"""Tensors are found, and others put in their places, in whatever a forward may return."""

from __future__ import annotations

import weakref
from collections import OrderedDict, UserDict
from dataclasses import InitVar, dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from parallel_core.outputs import map_tensors, tensors_in


@dataclass
class Loss:
    value: Any
    note: str = "kept"
    also: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class Frozen:
    value: Any


@dataclass
class Derived:
    start: InitVar[torch.Tensor]
    value: Any = field(init=False)

    def __post_init__(self, start: torch.Tensor) -> None:
        self.value = start


class Pair(NamedTuple):
    value: Any
    other: Any


ONE = torch.ones(2)
FORMS: list[Any] = [
    ONE,
    [ONE],
    (ONE,),
    {"a": {"b": ONE}},
    OrderedDict(a=ONE),
    Pair(ONE, None),
    Loss(ONE),
    Loss("text", also=[{"a": Frozen(ONE)}]),
    [Frozen((ONE, 3))],
    Derived(ONE),
]


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_a_tensor_is_found_and_replaced_in_every_form(form: Any) -> None:
    assert list(map(id, tensors_in(form))) == [id(ONE)]
    other = map_tensors(lambda tensor: tensor + 1, form)
    assert type(other) is type(form)
    assert [tensor.tolist() for tensor in tensors_in(other)] == [[2.0, 2.0]]
    assert list(map(id, tensors_in(form))) == [id(ONE)]  # the form itself is as it was


class Rows(dict[str, Any]):
    pass


class Row(list[Any]):
    pass


@pytest.mark.parametrize(
    "form", [Rows(a=ONE), Row([ONE]), [frozenset([ONE])], UserDict(a=ONE), SimpleNamespace(a=[ONE]), Loss(Rows(a=ONE))]
)
def test_tensors_are_found_in_kinds_that_pytree_does_not_know(form: Any) -> None:
    assert list(map(id, tensors_in(form))) == [id(ONE)]


def test_what_refers_to_itself_has_an_end_and_what_stands_twice_is_one() -> None:
    loss = Loss(ONE)
    loss.also.append(loss)
    assert list(map(id, tensors_in([loss, loss]))) == [id(ONE)]
    first, second = map_tensors(torch.neg, [loss, loss])
    assert first is second
    assert first.value.tolist() == [-1.0, -1.0]


def test_nothing_is_kept() -> None:
    gone: list[bool] = []
    tensor = torch.ones(2)
    weakref.finalize(tensor, gone.append, True)
    loss = Loss(tensor)
    list(tensors_in(loss))
    map_tensors(torch.neg, loss)
    del tensor, loss
    assert gone == [True]


def test_what_is_no_tensor_stays_as_it_is() -> None:
    loss = map_tensors(torch.neg, Loss(3, also=[ONE, Loss, None]))
    assert (loss.value, loss.note, loss.also[1:]) == (3, "kept", [Loss, None])
    assert list(tensors_in([1, None, "a", Loss])) == []
