"""Clauses on wrapping: declining, refusing, and what a wrapped model is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import parallel_core
from parallel_core import CheckpointError, WrapError
from parallel_core import ranks as collective
from parallel_core.record import inner_module
from parallel_core.strategy import bound_strategy
from parallel_core.testing import Ranks
from parallel_core.testing.conformance.declaration import Capability, Declaration, matches
from parallel_core.testing.conformance.runs import Run, differences, for_each, local, problems, whole
from parallel_core.testing.models import CASES


def identity(model: torch.nn.Module) -> list[Any]:
    """Return what must not change in a model whose wrap was refused."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [[type(module) for module in model.modules()], [(name, id(tensor)) for name, tensor in tensors]]


class WrapClauses(Declaration):
    """What comes out of `wrap_model_for_training`."""

    def test_declines_a_single_process(self, ranks: Ranks) -> None:
        """With no process group there is nothing to do: None, the model untouched, no process group made."""
        self.needs(Capability.DECLINING)
        config = self.config()

        def work() -> list[Any]:
            model = CASES["blocks"].build()
            before, values = identity(model), {name: value.clone() for name, value in model.state_dict().items()}
            answer = parallel_core.wrap_model_for_training(model, config, device="cpu")
            changes = differences(model.state_dict(), values)
            return [answer is None, identity(model) == before, changes, torch.distributed.is_initialized()]

        assert ranks(work, world_size=1, process_group=False) == [[True, True, [], False]]

    def test_computes_what_the_bare_model_computes(self, ranks: Ranks) -> None:
        """The wrapped model's output is the bare model's, in training and in evaluation, and its mode is at first."""

        def work(case: str, config: Any) -> list[str]:
            bare, run = CASES[case].build(), Run(case, config, change=torch.nn.Module.eval)
            if any(module.training for module in run.model.modules()):
                return ["a model in evaluation mode is in training mode after the wrap"]
            inputs, _ = CASES[case].batch(seed=1)
            found, expected = {}, {}
            for mode in ("train", "eval"):
                getattr(bare, mode)()
                getattr(run.model, mode)()
                with torch.no_grad():
                    found[mode], expected[mode] = run.model(inputs), bare(inputs)
            return differences(found, expected, tolerance=1e-6)

        assert problems(ranks(for_each, self.cases(), work)) == []

    def test_all_ranks_start_from_rank_0(self, ranks: Ranks, world_size: int) -> None:
        """Ranks that built the model from different seeds hold the same values after the wrap: rank 0's."""

        def work(case: str, config: Any) -> list[str]:
            run = Run(case, config, seed=collective.rank())
            found = whole(parallel_core.model_state_dict(run.model, "sharded"))
            return differences(found, CASES[case].build(seed=0).state_dict())

        assert problems(ranks(for_each, self.cases_on(world_size), work, world_size=world_size)) == []

    def test_refuses_models_that_differ_between_ranks(self, ranks: Ranks) -> None:
        """A parameter of another shape on one rank is one WrapError on every rank, and every model is as it was."""
        config = self.config()

        def work() -> list[Any]:
            width = 6 if collective.rank() == 0 else 5
            model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Linear(width, 6))
            return refusal(model, config)

        first, second = ranks(work, timeout=30)
        assert first == second
        assert first[1:] == [True, []]
        assert "0.weight" in first[0]

    def test_refuses_what_it_declares_to_refuse(self, ranks: Ranks, refused: str) -> None:
        """A model that the strategy can't honour is one WrapError on every rank, and the model is as it was."""
        config = self.config(refused)

        def work() -> list[Any]:
            return refusal(CASES[refused].build(), config)

        first, second = ranks(work, timeout=30)
        assert first == second
        assert first[1:] == [True, []]
        assert matches(self.refuses[refused], first[0]), first[0]

    def test_refuses_a_wrapped_model(self, ranks: Ranks) -> None:
        """Wrapping twice is a WrapError."""
        config = self.config()

        def work() -> str:
            run = Run("blocks", config)
            try:
                parallel_core.wrap_model_for_training(run.model, config)
            except WrapError as error:
                return str(error)
            return "no error"

        assert all("wrapped already" in message for message in ranks(work))

    def test_refuses_the_module_inside(self, ranks: Ranks) -> None:
        """Every verb refuses the module inside a wrapper, whose parameters may be shards."""
        config = self.config()

        def work() -> list[str]:
            run = Run("blocks", config)
            inner, optimizer = inner_module(run.model), run.optimizer
            assert optimizer is not None
            if inner is run.model:
                return []  # the strategy works in place: there is no module inside
            weights, state = run.state().values()
            verbs: dict[str, Callable[[], object]] = {
                "wrap_model_for_training": lambda: parallel_core.wrap_model_for_training(inner, config),
                "wrap_optimizer": lambda: parallel_core.wrap_optimizer(inner, optimizer),
                "clip_grad_norm": lambda: parallel_core.clip_grad_norm(inner, 1.0),
                "no_sync": lambda: parallel_core.no_sync(inner),
                "grad_scaler": lambda: parallel_core.grad_scaler(inner),
                "data_parallel": lambda: parallel_core.data_parallel(inner),
                "wrap_report": lambda: parallel_core.wrap_report(inner),
                "model_state_dict": lambda: parallel_core.model_state_dict(inner),
                "load_model_state_dict": lambda: parallel_core.load_model_state_dict(inner, weights),
                "optimizer_state_dict": lambda: parallel_core.optimizer_state_dict(inner, optimizer),
                "load_optimizer_state_dict": lambda: parallel_core.load_optimizer_state_dict(inner, optimizer, state),
                "save_checkpoint": lambda: parallel_core.save_checkpoint("unused", inner, optimizer),
                "load_checkpoint": lambda: parallel_core.load_checkpoint("unused", inner, optimizer),
            }
            found = []
            for name, verb in verbs.items():
                try:
                    verb()
                except (WrapError, CheckpointError) as error:
                    if "module inside" not in str(error):
                        found.append(f"{name}: {error}")
                else:
                    found.append(f"{name}: no error")
            return found

        assert ranks(work) == [[], []]

    def test_plans_its_units_without_ranks(self, ranks: Ranks) -> None:
        """The plan needs no ranks and no values; it names modules and parameters of the bare model, once each."""

        def work(case: str, config: Any) -> list[str]:
            with torch.device("meta"):
                model = CASES[case].make()
            units = bound_strategy(config.parallel_strategy).plan_units(model, config.options)
            modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
            planned = [name for unit in units for name in unit.parameters]
            return [
                *(f"{unit.name!r} is not its module" for unit in units if modules[unit.name] is not unit.module),
                *(f"{name!r} is no parameter" for name in planned if name not in parameters),
                *(f"{name!r} is planned twice" for name in set(planned) if planned.count(name) > 1),
            ]

        assert problems(ranks(for_each, self.cases(), work, world_size=1, process_group=False)) == []

    def test_reports_what_was_done(self, ranks: Ranks, world_size: int) -> None:
        """The wrap report has the planned units and all parameters, the same on every rank, which hold all bytes."""

        def work(case: str, config: Any) -> list[Any]:
            bare = CASES[case].build()
            units = bound_strategy(config.parallel_strategy).plan_units(bare, config.options)
            planned = [(unit.name, tuple(unit.parameters)) for unit in units]
            names = [name for name, _ in bare.named_parameters()]
            nbytes = sum(parameter.nbytes for parameter in bare.parameters())
            report = parallel_core.wrap_report(parallel_core.wrap_model_for_training(bare, config) or bare)
            if report is None:
                return [["there is no report"], None]
            told = [name for unit in (report.root, *report.units) for name in unit.parameters]
            found = {
                f"units are {report.units}": [(unit.name, unit.parameters) for unit in report.units] == planned,
                f"parameters are {told}": sorted(told) == sorted(names),
                f"{sum(report.held)} bytes are held": sum(report.held) >= nbytes,
                f"{report.nbytes} bytes of parameters": report.nbytes == nbytes,
                "the strategy": report.strategy == config.parallel_strategy,
                "the text": report.strategy in str(report),
            }
            return [[wrong for wrong, right in found.items() if not right], report]

        first, *others = ranks(for_each, self.cases(telling=True), work, world_size=world_size)
        assert {case: wrong for case, (wrong, _) in first.items() if wrong} == {}
        assert all(other == first for other in others)

    def test_shares_the_parameters_among_the_ranks(self, ranks: Ranks, world_size: int) -> None:
        """Each rank holds its share of the parameters, but for some padding of each unit."""
        self.needs(Capability.SHARDING)
        config = self.config("blocks")

        def work() -> list[int]:
            bare = CASES["blocks"].build()
            units = bound_strategy(config.parallel_strategy).plan_units(bare, config.options)
            total = sum(parameter.numel() for parameter in bare.parameters())
            wrapped = parallel_core.wrap_model_for_training(bare, config)
            assert wrapped is not None
            return [sum(local(parameter).numel() for parameter in wrapped.parameters()), total, len(units)]

        held = ranks(work, world_size=world_size)
        shares = [own for own, _, _ in held]
        advice = "if every rank is meant to hold the whole model, declare it: lacks = {Capability.SHARDING: reason}"
        assert sum(shares) == held[0][1], f"the ranks hold {shares} of {held[0][1]} parameters; {advice}"
        for own, total, units in held:
            assert units > 0
            # A unit is cut into equal pieces, or along the rows of each of its eight parameters of at most twelve.
            assert own <= total / world_size + 96 * units


def refusal(model: torch.nn.Module, config: Any) -> list[Any]:
    """Try a wrap that must be refused; return the message, whether the model is the same, and changed values."""
    before, values = identity(model), {name: value.clone() for name, value in model.state_dict().items()}
    try:
        parallel_core.wrap_model_for_training(model, config)
    except WrapError as error:
        return [str(error), identity(model) == before, differences(model.state_dict(), values)]
    return ["no error", True, []]
