"""The conformance kit finds what is wrong with a strategy, and nothing that is not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import pytest

from parallel_core.hookspecs import ENTRY_POINT_GROUP
from parallel_core.testing.conformance import Capability, StrategyConformance
from tests.commands import SUITE_LIMIT, clean_environment

MODULE = "broken_strategies"


class Fault(NamedTuple):
    """What a strategy must fail: the clause that it breaks, and those that can't hold without it."""

    breaks: str
    follows: tuple[str, ...] = ()

    @property
    def expected(self) -> set[str]:
        return {self.breaks, *self.follows}


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
    *("reading_state_before_the_first_step_changes_nothing", "forgets_a_forward_without_a_backward"),
)
CHECKPOINTS = ("a_checkpoint_comes_back", "a_checkpoint_moves_to_one_process_and_back")
GOES_ON = "training_goes_on_from_a_checkpoint"
RESUMES = "a_run_that_resumes_after_every_step_goes_on_all_the_same"
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
            *("a_resumed_run_goes_on_as_if_it_had_not_stopped", RESUMES, GOES_ON),
        ),
    ),
    "IgnoresNoSync": Fault("accumulates_in_silence"),
    "StaysQuietAfterAnError": Fault("no_sync_ends_with_its_block"),
    "CastsToBf16": Fault(
        "computes_what_the_bare_model_computes", (*START[1:], *NUMBERS, *GRADIENTS, "keeps_the_dtype_it_was_given")
    ),
    "ClipsLocally": Fault("clips_by_the_norm_of_the_whole_model"),
    "GivesEveryRankTheSameData": Fault("shares_out_the_data", (*NUMBERS, *GRADIENTS)),
    "NeverDeclines": Fault("declines_a_single_process", ("gives_a_single_process_its_values",)),
    "LeaksAProcessGroup": Fault("declines_a_single_process", ("gives_a_single_process_its_values",)),
    "ChangesTheModelBeforeItRefuses": Fault("refuses_models_that_differ_between_ranks", (*START, *NUMBERS, *GRADIENTS)),
    "PlansWhatIsNotThere": Fault("plans_its_units_without_ranks", ("reports_what_was_done",)),
    "PrefixesKeys": Fault(
        "full_state_is_the_bare_models",
        (
            *ALL_STATE,
            *CHECKPOINTS,
            GOES_ON,
            "all_ranks_start_from_rank_0",
            "ranks_stay_together",
            "skips_a_step_on_all_ranks_or_none",
        ),
    ),
    "DropsBuffers": Fault(
        "full_state_is_the_bare_models",
        (*STATE, *CHECKPOINTS, GOES_ON, "all_ranks_start_from_rank_0", "ranks_stay_together"),
    ),
    "SavesOnEveryRank": Fault("full_state_is_the_bare_models", (*ALL_STATE, CHECKPOINTS[1])),
    "SavesTheLiveTensors": Fault("full_state_is_a_snapshot"),
    "ShowsCopies": Fault("a_checkpoint_comes_back", (CHECKPOINTS[1], GOES_ON)),
    "LoadsOnRank0Alone": Fault(
        "state_comes_back",
        ("loads_what_fits_if_not_strict", "a_resumed_run_goes_on_as_if_it_had_not_stopped"),
    ),
    "HangsOnAMissingKey": Fault("loads_what_fits_if_not_strict"),
    "StepsToReadState": Fault("reading_state_before_the_first_step_changes_nothing"),
    "ForgetsTheOptions": Fault("optimizer_state_comes_back"),
}
STRATEGIES = ("Sound", *FAULTS)
BROKEN = {fault.breaks for fault in FAULTS.values()}
# What the table of the kit is looked at for, beside those: a clause that it lacks, and one that asks nothing.
IN_THE_TABLE = {"trains_compiled", "refuses_what_it_declares_to_refuse"}

# One model is enough, beside the two that clauses ask for by name: the kit's own breadth is not tried here.
SUITE = """
from parallel_core.testing.conformance import Capability, StrategyConformance


class Few(StrategyConformance):
    __test__ = False
    models = ["buffers"]
    lacks = {Capability.SHARDING: "every rank holds the whole model", Capability.COMPILE: "it takes long to try"}
"""
CLASS = """
class Test{name}(Few):
    __test__ = True
    strategy = "{strategy}"
"""


class Results(NamedTuple):
    """What became of the clauses, by strategy; of those that failed, with their messages; and what pytest printed."""

    passed: dict[str, set[str]]
    failed: dict[str, dict[str, str]]
    printed: str


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install all of the strategies in one distribution, and write a class of the kit's for each beside it."""
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
    return site


def run_kit(site: Path, clauses: Mapping[str, Iterable[str]]) -> Results:
    """Run clauses, by strategy, in one run of pytest that shares its ranks; none named means all."""
    tests = [
        f"test_kit.py::Test{strategy}{clause}"
        for strategy, named in clauses.items()
        for clause in (sorted(f"::test_{name}" for name in named) or [""])
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junit-xml=results.xml", *tests],
        cwd=site,
        env=clean_environment(PYTHONPATH=str(site), PYTHONHASHSEED="1"),  # one template for all ranks
        stdout=subprocess.PIPE,
        text=True,
        timeout=SUITE_LIMIT,
        check=False,  # tests fail, as they should
    )
    return read_results(site / "results.xml", done.stdout)


@pytest.fixture(scope="module")
def results(site: Path) -> Results:
    """Run each broken strategy on the clause that it breaks, and the sound one on all of these."""
    broken = {strategy: {fault.breaks} for strategy, fault in FAULTS.items()}
    return run_kit(site, {"Sound": BROKEN | IN_THE_TABLE, **broken})


@pytest.fixture(scope="module")
def all_results(site: Path) -> Results:
    """Run every strategy on every clause."""
    return run_kit(site, dict.fromkeys(STRATEGIES, ()))


def read_results(path: Path, printed: str) -> Results:
    """Read what pytest has written about a run."""
    found = Results({name: set() for name in STRATEGIES}, {name: {} for name in STRATEGIES}, printed)
    for test in ET.parse(path).iter("testcase"):  # pytest has just written it
        strategy = test.attrib["classname"].rpartition("Test")[2]
        clause = test.attrib["name"].partition("[")[0].removeprefix("test_")
        problems = [problem for kind in ("failure", "error") for problem in test.findall(kind)]
        if problems:
            found.failed[strategy][clause] = problems[0].text or ""
        elif test.find("skipped") is None:
            found.passed[strategy].add(clause)
    return found


def test_a_sound_strategy_passes_what_a_broken_one_fails(results: Results) -> None:
    assert results.failed["Sound"] == {}
    assert results.passed["Sound"] >= BROKEN


@pytest.mark.parametrize("strategy", FAULTS)
def test_a_broken_strategy_fails_what_it_breaks(results: Results, strategy: str) -> None:
    assert results.failed[strategy].keys() == {FAULTS[strategy].breaks}


def test_a_strategy_that_reduces_under_no_sync_is_told_what_to_declare(results: Results) -> None:
    (message,) = results.failed["IgnoresNoSync"].values()
    assert "a backward pass under no_sync reduces between ranks; if it has to, declare it: lacks = " in message


def test_a_strategy_whose_backward_reduces_nothing_is_told_what_to_declare(site: Path) -> None:
    found = run_kit(site, {"KeepsGradientsToItself": ["accumulates_in_silence"]})
    message = found.failed["KeepsGradientsToItself"]["accumulates_in_silence"]
    assert "no backward pass reduces between ranks; if that is done elsewhere, in the step say, declare it: " in message


@pytest.mark.parametrize(
    ("strategy", "clause", "verdict"),
    [
        ("Sound", "full_state_is_the_bare_models", "kept"),
        ("Sound", "trains_compiled", "lacks"),
        ("PrefixesKeys", "full_state_is_the_bare_models", "BROKEN"),
        ("PrefixesKeys", "trains_compiled", "-"),
    ],
)
def test_the_table_tells_of_each_clause_whether_a_strategy_keeps_it(
    results: Results, strategy: str, clause: str, verdict: str
) -> None:
    assert table_of(results.printed)[clause][strategy.lower()] == verdict


def test_a_clause_that_asks_nothing_is_not_in_the_table(results: Results) -> None:
    assert "refuses_what_it_declares_to_refuse" not in table_of(results.printed)


def table_of(printed: str) -> dict[str, dict[str, str]]:
    """Return the verdicts of the table that pytest has printed, by clause and strategy."""
    _, _, table = printed.partition(" conformance ====")
    head, *rows = (re.split(r" {2,}", line) for line in table.splitlines()[1:])
    return {
        row[0].replace(" ", "_"): dict(zip(head[1:], row[1:], strict=True)) for row in rows if len(row) == len(head)
    }


@pytest.mark.deep
def test_a_sound_strategy_fails_nothing(all_results: Results) -> None:
    assert all_results.failed["Sound"] == {}


@pytest.mark.deep
@pytest.mark.parametrize("strategy", FAULTS)
def test_a_broken_strategy_fails_what_follows_from_it_and_nothing_else(all_results: Results, strategy: str) -> None:
    failed, fault = all_results.failed[strategy], FAULTS[strategy]
    unexpected = [f"{clause}: {message}" for clause, message in failed.items() if clause not in fault.expected]
    assert failed.keys() == fault.expected, "\n\n".join(unexpected)


@pytest.mark.parametrize(
    ("declared", "problem"),
    [
        (
            {"options": {"sound_twice": True}},
            "options: expected names of settings without the strategy's prefix, found",
        ),
        ({"options": ["twice"]}, "options: expected a dict, found ['twice']"),
        ({"options_for": {"blocks": {"sound_x": 1}}}, "options_for['blocks']: expected names of settings without the"),
        ({"options_for": {"block": {}}}, "options_for: expected names of cases, found ['block']; cases are blocks, "),
        ({"models": ["block"]}, "models: expected names of cases, found ['block']; cases are blocks, "),
        ({"models": "blocks"}, "models: expected a list of names of cases, found 'blocks'"),
        ({"models": ()}, "models: expected a list of names of cases, found ()"),
        ({"refuses": {"block": "it"}}, "refuses: expected names of cases, found ['block']; cases are blocks, "),
        ({"refuses": {"frozen": "("}}, "refuses['frozen']: expected a regular expression, found '(' (missing ), "),
        ({"world_sizes": (1,)}, "world_sizes: expected a tuple of integers, each at least 2, found (1,)"),
        ({"world_sizes": 2}, "world_sizes: expected a tuple of integers, each at least 2, found 2"),
        ({"lacks": [Capability.SHARDING]}, "lacks: expected a dict, found [<Capability.SHARDING: "),
        (
            {"lacks": {"SHARDING": "it"}},
            "lacks: expected members of Capability, found 'SHARDING'; its members are SAME_",
        ),
        ({"lacks": {Capability.SHARDING: " "}}, "lacks: expected the reason why it lacks SHARDING, found ' '"),
        ({"lack": {Capability.SHARDING: "it"}}, "lack: no attribute of a declaration; did you mean 'lacks'?"),
        ({"strategy": None}, "strategy: expected its name, found None"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused_where_it_is_made(declared: dict[str, Any], problem: str) -> None:
    with pytest.raises(TypeError) as caught:
        type("TestSound", (StrategyConformance,), {"strategy": "sound", **declared})
    head, *problems = str(caught.value).split("\n  - ")
    assert head == "TestSound declares what can't be:"
    assert [each[: len(problem)] for each in problems] == [problem]


def test_all_that_is_wrong_with_a_declaration_is_told_at_once() -> None:
    with pytest.raises(TypeError) as caught:
        type("TestSound", (StrategyConformance,), {"strategy": "sound", "world_sizes": 2, "models": (), "refuse": {}})
    assert len(str(caught.value).splitlines()) == 4


def test_what_is_no_data_may_have_a_name_like_that_of_a_declaration() -> None:
    names = {"model": pytest.fixture(lambda self: None), "world_size": property(lambda self: 2), "mine": 1}
    declared: Any = type("TestSound", (StrategyConformance,), {"strategy": "sound", **names})
    assert [declared.strategy, declared.mine] == ["sound", 1]


def test_a_suite_that_names_no_strategy_is_refused_once(tmp_path: Path) -> None:
    suite = tmp_path / "test_suite.py"
    suite.write_text(
        "from parallel_core.testing.conformance import StrategyConformance\n\n"
        "class TestNone(StrategyConformance):\n    pass\n",
        encoding="utf-8",
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, suite],
        capture_output=True,
        encoding="utf-8",
        env=clean_environment(),
        timeout=SUITE_LIMIT,
        check=False,
    )
    assert "1 error in" in run.stdout, run.stdout
    assert "\nTestNone names no strategy; set `strategy` to its name, or `__test__ = False` where" in run.stdout


def test_no_more_cases_are_tried_than_are_declared() -> None:
    few = {"strategy": "ddp", "models": ("blocks", "frozen", "batch_norm"), "refuses": {"batch_norm": "it"}}
    kit: type[StrategyConformance] = type("TestFew", (StrategyConformance,), few)
    found = [kit.cases(), kit.cases(training=True), kit.cases_on(2), kit.cases_on(3), kit.cases(exact=True)]
    assert [list(cases) for cases in found] == [
        ["blocks", "frozen"],
        ["blocks"],
        ["blocks", "frozen"],
        *[["blocks"]] * 2,
    ]


def test_models_of_which_none_is_telling_are_tried_by_every_clause() -> None:
    kit: type[StrategyConformance] = type(
        "TestOne", (StrategyConformance,), {"strategy": "ddp", "models": ("buffers",)}
    )
    assert list(kit.cases(training=True, telling=True)) == list(kit.cases_on(3)) == ["buffers"]
