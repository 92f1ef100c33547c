"""Tensors that can't be handed from rank to rank, or not be trained, are named before a wrap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from parallel_core.tensor_checks import memory_problems, tensor_problems
from parallel_core.testing.models import CASES


@pytest.mark.parametrize("case", CASES)
def test_nothing_speaks_against_most_models(case: str) -> None:
    assert list(tensor_problems(CASES[case].build())) == []


def test_a_sparse_an_expanded_and_a_trained_tensor_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[1].register_buffer("near", torch.eye(2).to_sparse())
    model[1].register_buffer("wide", torch.ones(2, 1).expand(2, 3))
    model[1].register_parameter("alike", nn.Parameter(torch.ones(1).expand(4)))
    model[1].register_buffer("single", torch.ones(1).expand(1))  # one element that is there once
    model(torch.ones(1, 2)).sum().backward()
    found = [problem.partition(";")[0] for problem in tensor_problems(model)]
    shared = "is expanded, its elements share memory and can't be written one by one"
    assert found == [
        f"parameter '1.alike' of shape [4] and strides [0] {shared}",
        "buffer '1.near' is sparse (torch.sparse_coo), and dense ones alone can be sent",
        f"buffer '1.wide' of shape [2, 3] and strides [1, 0] {shared}",
        "parameter '0.weight' has a gradient already, which the ranks have not averaged",
    ]


def test_a_gradient_of_zeros_is_one_and_the_advice_takes_it_away() -> None:
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    model.zero_grad(set_to_none=False)
    (found,) = tensor_problems(model)
    assert found.endswith("; call zero_grad(set_to_none=True) before the wrap")
    model.zero_grad(set_to_none=True)
    assert list(tensor_problems(model)) == []


def test_what_was_made_for_inference_and_a_wrap_for_it_are_named() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    (made,) = tensor_problems(model)
    assert made.startswith("parameter 'weight' was made under torch.inference_mode()")
    plain = nn.Linear(2, 2)
    with torch.inference_mode():
        (found,) = tensor_problems(plain)
    assert found.startswith("torch.inference_mode() is on")


def test_a_buffer_that_was_made_for_inference_is_named() -> None:
    model = nn.Linear(2, 2)
    with torch.inference_mode():
        model.register_buffer("seen", torch.ones(2))
    (found,) = tensor_problems(model)
    assert found.startswith("buffer 'seen' was made under torch.inference_mode() and can't be written")


def test_an_embedding_that_writes_its_weight_in_the_forward_is_named() -> None:
    model = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.EmbeddingBag(4, 2, max_norm=1.0), nn.Embedding(4, 2))
    found = [problem.partition(" in each forward")[0] for problem in tensor_problems(model)]
    assert found == [f"{name!r} writes the rows that it looks up" for name in ("0", "1")]


class Tied(nn.Module):
    """Two layers whose weights are what a function makes of one tensor."""

    def __init__(self, first: Any, second: Any, *, buffer: bool = False) -> None:
        super().__init__()
        whole = torch.ones(4, 4)
        self.first = nn.Parameter(first(whole))
        if buffer:
            self.register_buffer("second", second(whole))
        else:
            self.second = nn.Parameter(second(whole))


@pytest.mark.parametrize(
    ("first", "second", "buffer"),
    [
        (lambda whole: whole, lambda whole: whole, False),
        (lambda whole: whole, lambda whole: whole.t(), False),
        (lambda whole: whole[:3], lambda whole: whole[2:], False),
        (lambda whole: whole, lambda whole: whole[1:2], False),
        (lambda whole: whole[1:2], lambda whole: whole, True),
    ],
)
def test_parameters_in_one_memory_are_named(first: Any, second: Any, *, buffer: bool) -> None:
    (found,) = memory_problems(Tied(first, second, buffer=buffer))
    assert "parameter 'first'" in found
    assert f"{'buffer' if buffer else 'parameter'} 'second'" in found
    assert "lie in the same memory, and the wrap would give each its own" in found


class Marked(nn.Parameter):
    """A class, and nothing more."""


def test_a_class_of_parameters_lies_in_memory_like_any_other() -> None:
    model = nn.Module()
    whole = torch.ones(4)
    model.first, model.second = Marked(whole), Marked(whole)
    (found,) = memory_problems(model)
    assert found.startswith("parameter 'first' and parameter 'second' lie in the same memory")


def test_columns_of_one_matrix_have_nothing_in_common() -> None:
    apart = Tied(lambda whole: whole[:, :2], lambda whole: whole[:, 2:])
    with torch.device("meta"):
        assert list(memory_problems(apart)) == []
    (found,) = memory_problems(Tied(lambda whole: whole[:, :3], lambda whole: whole[:, 2:]))
    assert "parameter 'first' and parameter 'second'" in found


def test_parts_of_one_memory_that_do_not_meet_and_tied_names_are_no_problem() -> None:
    assert list(memory_problems(Tied(lambda whole: whole[:2], lambda whole: whole[2:]))) == []
    for case in CASES.values():
        assert list(memory_problems(case.build())) == []
    model = nn.Linear(2, 2)
    one = torch.ones(2)
    model.register_buffer("one", one)
    model.register_buffer("same", one)  # what is not trained can't be trained apart
    assert list(memory_problems(model)) == []


def test_a_parameter_that_overlaps_one_before_the_last_is_named_too() -> None:
    model = nn.Module()
    whole = torch.ones(8)
    model.wide = nn.Parameter(whole)
    model.register_buffer("inside", whole[1:2])
    model.late = nn.Parameter(whole[6:])
    assert [found.partition(" lie")[0] for found in memory_problems(model)] == [
        "parameter 'wide' and buffer 'inside'",
        "parameter 'wide' and parameter 'late'",
    ]
