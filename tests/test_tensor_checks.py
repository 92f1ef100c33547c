"""Tensors that can't be handed from rank to rank, or not be trained, are named before a wrap."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel_core.tensor_checks import tensor_problems
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


def test_what_was_made_for_inference_and_a_wrap_for_it_are_named() -> None:
    with torch.inference_mode():
        model = nn.Linear(2, 2)
    (made,) = tensor_problems(model)
    assert made.startswith("parameter 'weight' was made under torch.inference_mode()")
    plain = nn.Linear(2, 2)
    with torch.inference_mode():
        (found,) = tensor_problems(plain)
    assert found.startswith("torch.inference_mode() is on")
