"""Finding strategies: metadata alone is read, and one broken plugin breaks nobody else."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel_core.errors import StrategyError
from parallel_core.registry import find_registration, load_plugin, registrations
from parallel_core.strategy import available_strategies, bound_strategy

Install = Callable[..., str]

GROUP = "[parallel_core.strategies]"


def write_distribution(site: Path, folder: str, *, metadata: str | None = None, entry_points: bytes = b"") -> None:
    (site / folder).mkdir()
    if metadata is not None:
        (site / folder / "METADATA").write_text(metadata)
    (site / folder / "entry_points.txt").write_bytes(entry_points)
    registrations.cache_clear()
    bound_strategy.cache_clear()


def test_a_strategy_is_found_by_its_entry_point(install_strategy: Install) -> None:
    install_strategy("ring", distribution="pc-ring", version="1.2")
    found = find_registration("ring")
    assert (found.name, found.distribution, found.version) == ("ring", "pc-ring", "1.2")
    assert str(found) == "'ring' (pc-ring 1.2)"


def test_finding_a_strategy_imports_nothing(install_strategy: Install) -> None:
    module = install_strategy("ring")
    assert list(registrations()) == ["ring"]
    find_registration("ring")
    assert module not in sys.modules


def test_strategies_are_listed_by_name(install_strategy: Install) -> None:
    install_strategy("ring", distribution="pc-ring")
    install_strategy("all2all", distribution="pc-all", version="0.3")
    install_strategy("mesh", distribution="pc-ring")
    assert [(found.name, found.distribution, found.version, found.error) for found in available_strategies()] == [
        ("all2all", "pc-all", "0.3", None),
        ("mesh", "pc-ring", "1.0", None),
        ("ring", "pc-ring", "1.0", None),
    ]


def test_what_is_installed_is_looked_for_once(install_strategy: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install_strategy("ring")
    registrations()
    monkeypatch.setattr(importlib.metadata, "distributions", None)
    assert list(registrations()) == ["ring"]


def test_an_unknown_name_is_told_with_the_installed_ones_and_the_nearest(install_strategy: Install) -> None:
    install_strategy("ddp", distribution="parallel-core-ddp", version="0.1.0")
    install_strategy("fsdp", distribution="parallel-core-fsdp", version="0.1.0")
    with pytest.raises(StrategyError) as caught:
        find_registration("fdsp")
    assert str(caught.value) == (
        "unknown strategy 'fdsp': installed are 'ddp' (parallel-core-ddp 0.1.0), 'fsdp' (parallel-core-fsdp 0.1.0); "
        "did you mean 'fsdp'?"
    )


def test_an_unknown_name_with_none_near_tells_how_a_strategy_is_registered(install_strategy: Install) -> None:
    install_strategy("ddp")
    with pytest.raises(StrategyError) as caught:
        find_registration("zero")
    assert str(caught.value) == (
        "unknown strategy 'zero': installed are 'ddp' (pc-fake 1.0); "
        "a strategy is an entry point of the group 'parallel_core.strategies'"
    )


@pytest.mark.usefixtures("only_fakes")
def test_where_nothing_is_installed_the_error_says_what_to_install() -> None:
    with pytest.raises(StrategyError) as caught:
        find_registration("ddp")
    assert str(caught.value) == (
        "unknown strategy 'ddp': no strategy is installed; `pip install parallel-core[all]` brings all of this project"
        "; a strategy is an entry point of the group 'parallel_core.strategies'"
    )
    assert available_strategies() == ()


def test_a_plugin_whose_import_fails_leaves_the_others_working(install_strategy: Install) -> None:
    install_strategy("ring")
    install_strategy("broken", "import no_such_module\n", distribution="pc-broken", version="2.0")
    assert bound_strategy("ring").name == "ring"
    broken, ring = available_strategies()
    assert ring.error is None
    assert (broken.name, broken.distribution) == ("broken", "pc-broken")
    assert str(broken.error) == (
        "strategy 'broken' (pc-broken 2.0) failed to load from 'fake_broken_pc_broken': ModuleNotFoundError: "
        "No module named 'no_such_module'; repair or uninstall pc-broken"
    )


def test_a_plugin_whose_import_fails_tells_why_when_it_is_named(install_strategy: Install) -> None:
    install_strategy("broken", "raise ValueError('no compiler')\n", distribution="pc-broken")
    with pytest.raises(StrategyError, match=r"pc-broken 1.0.* failed to load .*: ValueError: no compiler") as caught:
        bound_strategy("broken")
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_failed_import_is_tried_again(install_strategy: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook can repair a plugin without a new process."""
    install_strategy("late", "import fake_dependency\n\n" + WORKING, distribution="pc-late")
    with pytest.raises(StrategyError, match="No module named 'fake_dependency'"):
        bound_strategy("late")
    monkeypatch.setitem(sys.modules, "fake_dependency", sys)
    assert bound_strategy("late").name == "late"


WORKING = """
from parallel_core import StrategyConfig, hookimpl

class Config(StrategyConfig):
    pass

@hookimpl
def strategy_config():
    return Config

@hookimpl
def wrap_model(model):
    return model
"""


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        ("import sys\nsys.exit('needs a licence')", "SystemExit: needs a licence"),
        ("def f(:", "SyntaxError: invalid syntax (fake_broken_pc_fake.py, line 1)"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_whatever_an_import_raises_is_a_strategy_error(install_strategy: Install, plugin: str, reason: str) -> None:
    install_strategy("broken", plugin)
    with pytest.raises(StrategyError) as caught:
        load_plugin(find_registration("broken"))
    assert str(caught.value) == (
        f"strategy 'broken' (pc-fake 1.0) failed to load from 'fake_broken_pc_fake': {reason}; "
        "repair or uninstall pc-fake"
    )


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("fake_ring_pc_fake:Missing", "AttributeError: module 'fake_ring_pc_fake' has no attribute 'Missing'"),
        ("fake_nowhere", "ModuleNotFoundError: No module named 'fake_nowhere'"),
    ],
)
def test_an_entry_point_to_nothing_fails_when_it_is_named(
    install_strategy: Install, only_fakes: Path, value: str, reason: str
) -> None:
    install_strategy("ring")
    write_distribution(
        only_fakes,
        "pc_lost-1.0.dist-info",
        metadata="Metadata-Version: 2.1\nName: pc-lost\nVersion: 1.0\n",
        entry_points=f"{GROUP}\nlost = {value}\n".encode(),
    )
    assert bound_strategy("ring").name == "ring"
    with pytest.raises(StrategyError) as caught:
        bound_strategy("lost")
    assert str(caught.value) == (
        f"strategy 'lost' (pc-lost 1.0) failed to load from '{value}': {reason}; repair or uninstall pc-lost"
    )


def test_an_unknown_name_lists_those_that_failed_to_load_with_their_reasons(install_strategy: Install) -> None:
    install_strategy("ring")
    install_strategy("broken", "import no_such_module\n", distribution="pc-broken", version="2.0")
    with pytest.raises(StrategyError) as caught:
        bound_strategy("rang")
    assert str(caught.value) == (
        "unknown strategy 'rang': installed are 'ring' (pc-fake 1.0); "
        "strategy 'broken' (pc-broken 2.0) failed to load from 'fake_broken_pc_broken': ModuleNotFoundError: "
        "No module named 'no_such_module'; repair or uninstall pc-broken; did you mean 'ring'?"
    )


def test_one_name_of_two_distributions_is_an_error_that_names_both_when_it_is_used(install_strategy: Install) -> None:
    install_strategy("ring", distribution="pc-one")
    install_strategy("ring", distribution="pc-two", version="2.0")
    install_strategy("other", distribution="pc-other")
    assert bound_strategy("other").name == "other"
    with pytest.raises(StrategyError) as caught:
        bound_strategy("ring")
    first, second = sorted(["pc-one 1.0", "pc-two 2.0"], key=str(caught.value).find)
    assert str(caught.value) == f"strategy 'ring' is claimed by {first} and {second}; uninstall all of them but one"
    listed = [(found.name, found.distribution, str(found.error)) for found in available_strategies()]
    assert sorted(listed) == [
        ("other", "pc-other", "None"),
        ("ring", "pc-one", str(caught.value)),
        ("ring", "pc-two", str(caught.value)),
    ]


def test_a_claimed_name_does_not_hide_the_others_from_an_unknown_one(install_strategy: Install) -> None:
    install_strategy("ring", distribution="pc-one")
    install_strategy("ring", distribution="pc-two")
    install_strategy("other", distribution="pc-other")
    with pytest.raises(
        StrategyError, match=r"^unknown strategy 'x': installed are 'other' \(pc-other 1.0\); strategy "
    ):
        bound_strategy("x")


def test_one_name_twice_in_one_distribution_is_an_error_too(install_strategy: Install) -> None:
    install_strategy("ring")
    install_strategy("ring", object())
    with pytest.raises(StrategyError) as caught:
        bound_strategy("ring")
    assert str(caught.value) == (
        "strategy 'ring' is claimed more than once by pc-fake 1.0, for 'fake_ring_pc_fake' and "
        "'fake_ring_pc_fake:plugin'; repair or uninstall pc-fake"
    )
    install_strategy("ring", distribution="pc-other")
    with pytest.raises(StrategyError, match=r"is claimed by pc-(fake|other) 1\.0 and pc-(fake|other) 1\.0; uninstall"):
        bound_strategy("ring")


def seen_through(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setattr(
        importlib.metadata,
        "distributions",
        lambda: importlib.metadata.Distribution.discover(path=[str(folder) for folder in folders]),
    )
    registrations.cache_clear()


def test_the_same_distribution_seen_twice_is_one(
    install_strategy: Install, only_fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where lib64 is a link to lib and both are on the path."""
    install_strategy("ring")
    (tmp_path / "link").symlink_to(only_fakes, target_is_directory=True)
    seen_through(monkeypatch, only_fakes, tmp_path / "link")
    assert len(registrations()["ring"]) == 1
    assert bound_strategy("ring").name == "ring"


def test_an_egg_info_beside_a_dist_info_is_one_distribution(
    install_strategy: Install, only_fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_strategy("ring", distribution="pc-fake", version="2.0")
    egg = tmp_path / "source" / "PC_Fake.egg-info"
    egg.mkdir(parents=True)
    (egg / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: PC.Fake\nVersion: 1.0\n")
    (egg / "entry_points.txt").write_text(f"{GROUP}\nring = fake_ring_pc_fake\n")
    seen_through(monkeypatch, only_fakes, tmp_path / "source")
    [found] = registrations()["ring"]
    assert (found.distribution, found.version) == ("pc-fake", "2.0")


@pytest.mark.parametrize("name", ["Ring", "ring_two", "ring-two", "2ring", "ring.two", "réseau"])
def test_a_name_that_can_be_no_prefix_of_a_setting_is_refused(install_strategy: Install, name: str) -> None:
    install_strategy("ring")
    install_strategy(name, distribution="pc-odd")
    assert bound_strategy("ring").name == "ring"
    with pytest.raises(StrategyError) as caught:
        bound_strategy(name)
    assert str(caught.value) == (
        f"{name!r} (pc-odd 1.0) can't be the name of a strategy: allowed are lower-case letters and digits, a letter "
        "first; rename the entry point in pc-odd"
    )


ODD = "Metadata-Version: 2.1\nName: pc-odd\nVersion: 1.0\n"


@pytest.mark.parametrize(
    ("metadata", "entry_points", "reason"),
    [
        (ODD, b"[parallel_core.strategies]\nno equals sign\n", "Pair"),
        (ODD, b"[parallel_core.strategies]\nr\xe9seau = odd\n", "'utf-8' codec can't decode"),
        (ODD, b"[console_scripts]\nr\xe9seau = odd:main\n", "'utf-8' codec can't decode"),
        ("", b"[parallel_core.strategies]\nodd = odd\n", "its metadata gives no name"),
        (None, b"[parallel_core.strategies]\nodd = odd\n", ""),
    ],
    ids=["not an entry", "another encoding", "another encoding elsewhere", "empty metadata", "no metadata"],
)
def test_a_damaged_distribution_registers_nothing_and_is_warned_about(
    install_strategy: Install,
    only_fakes: Path,
    caplog: pytest.LogCaptureFixture,
    metadata: str | None,
    entry_points: bytes,
    reason: str,
) -> None:
    install_strategy("ring")
    write_distribution(only_fakes, "pc_odd-1.0.dist-info", metadata=metadata, entry_points=entry_points)
    with caplog.at_level(logging.WARNING, "parallel_core"):
        assert list(registrations()) == ["ring"]
    assert bound_strategy("ring").name == "ring"
    [message] = caplog.messages
    assert message.startswith(f"{only_fakes / 'pc_odd-1.0.dist-info'}: its entry points can't be read (")
    assert reason in message
    assert message.endswith("), so it registers nothing")


def test_a_distribution_without_a_version_is_usable(install_strategy: Install, only_fakes: Path) -> None:
    module = install_strategy("ring")
    write_distribution(
        only_fakes,
        "pc_odd-1.0.dist-info",
        metadata="Metadata-Version: 2.1\nName: pc-odd\n",
        entry_points=f"{GROUP}\nodd = {module}\n".encode(),
    )
    assert str(bound_strategy("odd")) == "'odd' (pc-odd of unknown version)"


def test_other_groups_of_a_distribution_are_nobodys_business(
    install_strategy: Install, only_fakes: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install_strategy("ring")
    write_distribution(
        only_fakes,
        "other-1.0.dist-info",
        metadata="Metadata-Version: 2.1\nName: other\nVersion: 1.0\n",
        entry_points=b"[console_scripts]\nno equals sign\n[parallel_core.strategies_of_old]\nold = nowhere\n",
    )
    assert list(registrations()) == ["ring"]
    assert caplog.messages == []


@pytest.mark.parametrize("value", ["p 9!!", "a:b:c!"])
def test_a_malformed_entry_point_is_told_of(only_fakes: Path, value: str) -> None:
    entry = f"{GROUP}\nring = {value}\n".encode()
    metadata = "Metadata-Version: 2.1\nName: pc-ring\nVersion: 1.0\n"
    write_distribution(only_fakes, "pc_ring-1.0.dist-info", metadata=metadata, entry_points=entry)
    with pytest.raises(StrategyError) as caught:
        bound_strategy("ring")
    assert str(caught.value) == (
        f"strategy 'ring' (pc-ring 1.0): its entry point is {value!r}, expected 'module' or 'module:object'; repair or "
        f"uninstall pc-ring"
    )


def test_an_object_that_can_not_be_looked_at_breaks_nobody_else(install_strategy: Install) -> None:
    body = "class Evil:\n    def __dir__(self):\n        raise RuntimeError('no')\n\nevil = Evil()\n"
    install_strategy("evil", body, distribution="pc-evil", entry_point=":evil")
    install_strategy("ring", distribution="pc-ring")
    evil, ring = available_strategies()
    assert ring.error is None
    assert "an object of Evil can't be looked at: RuntimeError: no; repair or uninstall pc-evil" in str(evil.error)
