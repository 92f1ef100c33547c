"""The conformance kit finds what is wrong with a strategy, and nothing that is not."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

from parallel_core.hookspecs import ENTRY_POINT_GROUP
from parallel_core.testing import Ranks
from tests.discovery import look_again

MODULE = "broken_strategies"


class Fault(NamedTuple):
    """What a strategy must fail: the clause that it breaks, and those that can't hold without it."""

    breaks: str
    follows: tuple[str, ...] = ()


# Clauses that compare with one process; most of them read the weights from a full state dict.
NUMBERS = (
    "trains_as_one_process_does",
    "accumulates_the_gradient_of_the_whole_batch",
    "no_sync_ends_with_its_block",
)
# Clauses that read weights, or load what they have read.
STATE = (
    *("full_state_is_the_bare_models", "sharded_state_is_on_every_rank", "state_comes_back"),
    *("loads_the_bare_models_state", "state_loads_into_the_bare_model", "state_moves_to_another_number_of_ranks"),
    *("loads_right_after_an_evaluation", "a_resumed_run_goes_on_as_if_it_had_not_stopped"),
    "trains_as_one_process_does",
)
ALL_STATE = (
    *(*STATE, *NUMBERS[1:], "full_state_is_a_snapshot", "keeps_the_dtype_it_was_given", "tied_parameters_stay_tied"),
    *("a_dict_that_does_not_fit_is_refused", "loads_what_fits_if_not_strict", "leaves_unused_parameters_alone"),
    "reading_state_before_the_first_step_changes_nothing",
)
GRADIENTS = ("clips_by_the_norm_of_the_whole_model", "optimizer_state_is_the_bare_models")
START = ("computes_what_the_bare_model_computes", "all_ranks_start_from_rank_0", "full_state_is_the_bare_models")

FAULTS = {
    "ForgetsToBroadcast": Fault("all_ranks_start_from_rank_0", ("trains_as_one_process_does", "ranks_stay_together")),
    # AdamW takes the same steps whatever the gradients are multiplied with.
    "SumsGradients": Fault("accumulates_the_gradient_of_the_whole_batch", GRADIENTS),
    "KeepsGradientsToItself": Fault(
        "ranks_stay_together",
        (
            *(*NUMBERS, *GRADIENTS, "accumulates_in_silence", "state_comes_back"),
            "a_resumed_run_goes_on_as_if_it_had_not_stopped",
        ),
    ),
    "IgnoresNoSync": Fault("accumulates_in_silence"),
    "StaysQuietAfterAnError": Fault("no_sync_ends_with_its_block"),
    "CastsToBf16": Fault(
        "computes_what_the_bare_model_computes", (*START[1:], *NUMBERS, *GRADIENTS, "keeps_the_dtype_it_was_given")
    ),
    "ClipsLocally": Fault("clips_by_the_norm_of_the_whole_model"),
    "GivesEveryRankTheSameData": Fault("shares_out_the_data", (*NUMBERS, *GRADIENTS)),
    "NeverDeclines": Fault("declines_a_single_process"),
    "LeaksAProcessGroup": Fault("declines_a_single_process"),
    "ChangesTheModelBeforeItRefuses": Fault("refuses_models_that_differ_between_ranks", (*START, *NUMBERS, *GRADIENTS)),
    "PlansWhatIsNotThere": Fault("plans_its_units_without_ranks"),
    "PrefixesKeys": Fault(
        "full_state_is_the_bare_models",
        (*ALL_STATE, "all_ranks_start_from_rank_0", "ranks_stay_together", "skips_a_step_on_all_ranks_or_none"),
    ),
    "DropsBuffers": Fault(
        "full_state_is_the_bare_models", (*STATE, "all_ranks_start_from_rank_0", "ranks_stay_together")
    ),
    "SavesInBf16": Fault(
        "full_state_is_the_bare_models",
        (*(*STATE, *NUMBERS, "all_ranks_start_from_rank_0", "loads_what_fits_if_not_strict"),),
    ),
    "SavesOnEveryRank": Fault("full_state_is_the_bare_models", ALL_STATE),
    "SavesTheLiveTensors": Fault("full_state_is_a_snapshot"),
    "LoadsOnRank0Alone": Fault(
        "state_comes_back",
        ("loads_what_fits_if_not_strict", "a_resumed_run_goes_on_as_if_it_had_not_stopped"),
    ),
    "HangsOnAMissingKey": Fault("loads_what_fits_if_not_strict"),
    "WantsEveryKey": Fault("loads_what_fits_if_not_strict"),
    "StepsToReadState": Fault("reading_state_before_the_first_step_changes_nothing"),
    "ForgetsTheOptions": Fault("optimizer_state_comes_back"),
}
STRATEGIES = ("Sound", *FAULTS)

# One model is enough, beside the two that clauses ask for by name: the kit's own breadth is not tried here.
SUITE = """
import sys
import pytest
from parallel_core.testing.conformance import Capability, StrategyConformance


@pytest.fixture(scope="session")
def ranks():
    return sys.modules["outer"].RANKS


class Few(StrategyConformance):
    __test__ = False
    lacks = {Capability.SHARDING: "every rank holds the whole model", Capability.COMPILE: "it takes long to try"}

    @classmethod
    def cases(cls, **which):
        return {"buffers": super().cases()["buffers"]}
"""
CLASS = """
class Test{name}(Few):
    __test__ = True
    strategy = "{strategy}"
"""


class Results:
    """A pytest plugin that notes which clauses a class has failed, with the messages."""

    def __init__(self) -> None:
        self.failed: dict[str, dict[str, str]] = {name: {} for name in STRATEGIES}
        self.passed: dict[str, set[str]] = {name: set() for name in STRATEGIES}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _, owner, name = report.nodeid.split("::")
        clause = name.partition("[")[0].removeprefix("test_")
        if report.failed:
            self.failed[owner.removeprefix("Test")][clause] = report.longreprtext
        elif report.when == "call" and report.passed:
            self.passed[owner.removeprefix("Test")].add(clause)


@pytest.fixture(scope="module")
def results(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Install all of the strategies in one distribution, and run the kit on each with the ranks that are here."""
    site = tmp_path_factory.mktemp("site")
    names = {name: name.lower() for name in STRATEGIES}
    shutil.copy(Path(__file__).with_name(f"{MODULE}.py"), site)
    with (site / f"{MODULE}.py").open("a") as module:
        module.writelines(f"{strategy} = {name}()\n" for name, strategy in names.items())
    folder = site / "broken_strategies-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-strategies\nVersion: 1.0\n")
    entries = [f"{strategy} = {MODULE}:{strategy}" for strategy in names.values()]
    (folder / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *entries]))
    classes = [CLASS.format(name=name, strategy=strategy) for name, strategy in names.items()]
    (site / "test_kit.py").write_text(SUITE + "".join(classes))
    (site / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    found = Results()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        outer = ModuleType("outer")
        vars(outer)["RANKS"] = ranks
        patch.setitem(sys.modules, "outer", outer)
        look_again()
        ranks(look_again, world_size=3, process_group=False)
        options = ["-q", "--no-header", "--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist"]
        pytest.main([*options, "-c", str(site / "pytest.ini"), str(site / "test_kit.py")], plugins=[found])
    look_again(MODULE)
    ranks(look_again, MODULE, world_size=3, process_group=False)
    return found


def test_a_sound_strategy_fails_nothing(results: Results) -> None:
    assert results.failed["Sound"] == {}
    assert {fault.breaks for fault in FAULTS.values()} <= results.passed["Sound"]


@pytest.mark.parametrize("strategy", FAULTS)
def test_a_broken_strategy_fails_what_it_breaks_and_what_follows_and_no_more(results: Results, strategy: str) -> None:
    failed, fault = results.failed[strategy], FAULTS[strategy]
    expected = {fault.breaks, *fault.follows}
    unexpected = [f"{clause}: {message}" for clause, message in failed.items() if clause not in expected]
    assert failed.keys() == expected, "\n\n".join(unexpected)
