"""The wrap report says what was asked for and what was done, for any strategy, and can be read."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import parallel_core
from parallel_core import WrapError, WrapReport, wrap_model_for_training, wrap_report
from parallel_core.record import attach, find_record
from parallel_core.report import ReportedUnit, bytes_held

Install = Callable[..., str]

CUTTER = """
from parallel_core import StrategyConfig, hookimpl

class CutterConfig(StrategyConfig):
    size: int = 5
    dtype: str = "fp32"

@hookimpl
def strategy_config():
    return CutterConfig

@hookimpl
def applies():
    return True

@hookimpl
def plan_units(model, config):
    from parallel_core.units import choose_units
    return choose_units(model, config.size)

@hookimpl
def wrap_model(model):
    import torch
    for parameter in model.parameters():
        if parameter.shape[0] == 8:  # keeps the first half
            parameter.data = parameter.data[:4].clone()
    return model
"""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.up.weight.T @ self.up.weight


class Tied(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x  # never called


@pytest.fixture
def wrap(install_strategy: Install) -> Callable[..., nn.Module]:
    install_strategy("cutter", CUTTER, distribution="pc-cutter", version="2.1")

    def wrapped(model: nn.Module, **settings: Any) -> nn.Module:
        config = parallel_core.DistributedConfig(parallel_strategy="cutter", **settings)
        answer = wrap_model_for_training(model, config, device="cpu")
        assert answer is not None
        return answer

    return wrapped


def test_the_report_of_any_strategy_has_what_was_asked_and_what_was_done(wrap: Callable[..., nn.Module]) -> None:
    report = wrap_report(wrap(Tied(), cutter_size=30))
    assert report == WrapReport(
        strategy="cutter",
        plugin="pc-cutter 2.1",
        settings={"cutter_size": 30, "cutter_dtype": "fp32"},
        changed=("cutter_size",),
        values="the model as it was built",
        units=tuple(ReportedUnit(f"blocks.{index}.up", (f"blocks.{index}.up.weight",), 32) for index in range(3)),
        root=ReportedUnit("", ("scale", "embed.weight"), 28),
        tied=(("embed.weight", "head.weight"),),
        dtypes={"bfloat16": 4, "float32": 24 + 96},
        nbytes=8 + 120 * 4,
        held=(8 + (24 + 48) * 4,),
        devices=("cpu",),
    )
    assert report.numel == 124


def test_the_text_of_a_report_reads_from_top_to_bottom_with_like_units_folded(
    wrap: Callable[..., nn.Module],
) -> None:
    assert str(wrap_report(wrap(Tied(depth=12), cutter_size=30))).splitlines() == [
        "wrapped by strategy 'cutter' (pc-cutter 2.1) on 1 rank",
        "  settings    cutter_size = 30",
        "              by default: cutter_dtype = 'fp32'",
        "  parameters  412: 4 of bfloat16 and 408 of float32, 1.6 KiB",
        "  values      from the model as it was built",
        "  units       blocks.0.up ... blocks.11.up: 12 units of 32",
        "  root        28: scale, embed.weight",
        "  tied        embed.weight = head.weight",
        "  held        872 bytes on each rank, of 1.6 KiB of parameters, on cpu",
    ]


def test_the_text_says_so_where_there_are_no_units_no_parameters_and_no_settings_but_defaults(
    wrap: Callable[..., nn.Module],
) -> None:
    assert str(wrap_report(wrap(nn.Tanh()))).splitlines() == [
        "wrapped by strategy 'cutter' (pc-cutter 2.1) on 1 rank",
        "  settings    by default: cutter_size = 5, cutter_dtype = 'fp32'",
        "  parameters  none",
        "  values      from the model as it was built",
        "  units       none: the root is all of the model",
        "  root        nothing",
        "  held        0 bytes on each rank, of 0 bytes of parameters, on cpu",
    ]


def of(**changes: Any) -> WrapReport:
    facts: dict[str, Any] = {
        "strategy": "s",
        "plugin": "pc-s 1.0",
        "settings": {},
        "changed": (),
        "values": "the model as it was built",
        "units": (),
        "root": ReportedUnit("", (), 0),
        "tied": (),
        "dtypes": {"float32": 2**20},
        "nbytes": 2**22,
        "held": (2**22,),
        "devices": ("cpu",),
    }
    return WrapReport(**(facts | changes))


def line_of(report: WrapReport, title: str) -> str:
    return next(line for line in str(report).splitlines() if line.startswith(f"  {title}"))


def test_ranks_are_told_one_by_one_if_they_are_few_and_by_their_extremes_if_not() -> None:
    few = of(held=(2**21 + 1024, 2**21), devices=("cuda:0", "cuda:1"))
    assert line_of(few, "held") == (
        "  held        2.0 MiB on rank 0, 2.0 MiB on rank 1, of 4.0 MiB of parameters, on cuda"
    )
    many = of(held=(2**20, *[2**21] * 9, 2**22, 2**21), devices=tuple(f"cuda:{index}" for index in range(12)))
    assert line_of(many, "held") == (
        "  held        from 1.0 MiB on rank 0 to 4.0 MiB on rank 10, of 4.0 MiB of parameters, on cuda"
    )


def test_units_that_are_all_different_are_cut_off_with_their_number() -> None:
    units = tuple(ReportedUnit(f"part_{chr(97 + index)}", (), index) for index in range(20))
    lines = str(of(units=units)).splitlines()
    assert lines[3] == "  units       part_a: 0"
    assert lines[14:16] == ["              part_l: 11", "              and 8 more units"]


def test_tied_parameters_are_folded_as_units_are_and_many_names_cut_off() -> None:
    layers = tuple((f"layers.{index}.a", f"layers.{index}.b") for index in range(1000))
    everywhere = tuple(f"layers.{index}.scale" for index in range(2000))
    lines = str(of(tied=(("embed.weight", "head.weight"), *layers, everywhere))).splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("  tied"))
    scales = " = ".join(everywhere[:6])
    assert lines[first : first + 3] == [
        "  tied        embed.weight = head.weight",
        "              layers.0.a = layers.0.b ... layers.999.a = layers.999.b: 1000 parameters",
        f"              {scales} = ... and 1994 more names",
    ]
    unlike = tuple((f"{letter}.x", f"{letter}.y") for letter in "abcdefghijklmnopqrstuvwxyz")
    lines = str(of(tied=unlike)).splitlines()
    assert lines[-2] == "              and 14 more parameters"


def test_units_in_blocks_are_folded_by_what_they_are(wrap: Callable[..., nn.Module]) -> None:
    units = tuple(
        ReportedUnit(f"h.{index}.{part}", (), size) for index in range(3) for part, size in (("attn", 70), ("mlp", 90))
    )
    lines = str(of(units=units)).splitlines()
    assert lines[3:5] == [
        "  units       h.0.attn ... h.2.attn: 3 units of 70",
        "              h.0.mlp ... h.2.mlp: 3 units of 90",
    ]


def test_names_are_the_bare_models_where_parts_of_it_are_compiled(wrap: Callable[..., nn.Module]) -> None:
    compiled: Any = torch.compile(nn.Linear(4, 4), backend="aot_eager")
    model = nn.Sequential(compiled, nn.Linear(4, 2, bias=False))
    report = wrap_report(wrap(model, cutter_size=10))
    assert report is not None
    assert report.units == (ReportedUnit("0", ("0.weight", "0.bias"), 20),)
    assert report.root == ReportedUnit("", ("1.weight",), 8)


def test_what_is_held_is_memory_a_view_keeps_all_of_it_and_tied_parameters_are_held_once() -> None:
    layer = nn.Linear(4, 4, bias=False)
    assert bytes_held(nn.Sequential(layer, layer)) == 64
    layer.weight.data = torch.zeros(100, 4)[:4]
    assert bytes_held(layer) == 1600


def test_a_bare_model_has_no_report_and_the_module_inside_a_wrapped_one_is_refused(
    wrap: Callable[..., nn.Module],
) -> None:
    assert wrap_report(nn.Linear(2, 2)) is None
    wrapped = wrap(nn.Linear(2, 2))
    record = find_record(wrapped)
    assert record is not None
    outer, inner = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    attach(record, outer, bare=inner)
    with pytest.raises(WrapError, match="this Linear is the module inside a wrapped model"):
        wrap_report(inner)


def test_the_report_is_found_through_compile_and_survives_deepcopy_and_pickle(
    wrap: Callable[..., nn.Module],
) -> None:
    model = wrap(nn.Sequential(nn.Linear(2, 2)))
    report = wrap_report(model)
    compiled: Any = torch.compile(model, backend="aot_eager")
    assert wrap_report(compiled) is report
    assert wrap_report(copy.deepcopy(model)) is report
    assert wrap_report(pickle.loads(pickle.dumps(model))) == report
    assert pickle.loads(pickle.dumps(report)) == report


def test_the_report_is_logged_as_one_record(wrap: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    report = wrap_report(wrap(Tied()))
    assert [(entry.name, entry.levelname, entry.getMessage()) for entry in caplog.records] == [
        ("parallel_core.report", "INFO", str(report))
    ]


def test_a_plan_that_fails_is_one_error_before_anything_is_touched(install_strategy: Install) -> None:
    install_strategy("cutter", CUTTER.replace("return choose_units", "return model.nothing"), distribution="pc-cutter")
    config = parallel_core.DistributedConfig(parallel_strategy="cutter")
    with pytest.raises(WrapError, match=r"^strategy 'cutter' \(pc-cutter 1.0\) failed to plan its units: Attribute"):
        wrap_model_for_training(nn.Linear(2, 2), config, device="cpu")
