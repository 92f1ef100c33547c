"""`DistributedConfig` is composed from the installed strategies, and is valid whichever way it comes about."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from parallel_core import config as config_module
from parallel_core.config import DistributedConfigBase
from parallel_core.errors import ConfigError, StrategyError
from parallel_core.registry import registrations
from parallel_core.strategy import available_strategies
from parallel_core.strategy_config import CORE_FIELDS

pytestmark = pytest.mark.usefixtures("ddp_and_fsdp")

InstallStrategy = Callable[..., str]

RULES = """
first: int = 1
second: int = 2
names: tuple[str, ...] = ()

def problems(self):
    if self.first >= self.second:
        yield f"first must be below second ({self.second}), found {self.first}"
"""

DDP_FIELDS = (
    "'ddp_find_unused_parameters', 'ddp_gradient_as_bucket_view', 'ddp_static_graph', 'ddp_bucket_cap_mb', "
    "'ddp_broadcast_buffers'"
)
FSDP_FIELDS = "'fsdp_mixed_precision', 'fsdp_auto_wrap_min_params', 'fsdp_cpu_offload', 'fsdp_sync_module_states'"
CORE = "'parallel_strategy', 'backend', 'timeout_seconds'"
INSTALLED = "installed are 'ddp' (parallel-core-ddp 0.1.0), 'fsdp' (parallel-core-fsdp 0.1.0)"


def make(**fields: Any) -> Any:
    """Make a config of the strategies that are installed at this moment."""
    return config_module.DistributedConfig(**fields)


def problems_of(**fields: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as refused:
        make(**fields)
    return refused.value.problems


def test_it_has_the_core_s_fields_and_each_strategy_s_under_its_name() -> None:
    assert msgspec.structs.asdict(make()) == {
        "parallel_strategy": "ddp",
        "backend": "auto",
        "timeout_seconds": 600.0,
        "ddp_find_unused_parameters": False,
        "ddp_gradient_as_bucket_view": True,
        "ddp_static_graph": False,
        "ddp_bucket_cap_mb": None,
        "ddp_broadcast_buffers": True,
        "fsdp_mixed_precision": "bf16",
        "fsdp_auto_wrap_min_params": 10_000_000,
        "fsdp_cpu_offload": False,
        "fsdp_sync_module_states": True,
    }


def test_the_fields_that_no_strategy_can_have_are_the_core_s() -> None:
    assert DistributedConfigBase.__struct_fields__ == CORE_FIELDS


def test_options_are_the_chosen_strategy_s_own_struct() -> None:
    config = make(parallel_strategy="fsdp", fsdp_cpu_offload=True, ddp_static_graph=True)
    assert repr(config.options) == (
        "FakeConfig(mixed_precision='bf16', auto_wrap_min_params=10000000, cpu_offload=True, sync_module_states=True)"
    )
    assert config.options == config.options_for("fsdp")
    assert config.options_for("ddp").static_graph is True


def test_where_the_default_strategy_is_not_installed_only_naming_it_is_an_error(
    only_fakes: Path, install_strategy: InstallStrategy
) -> None:
    (only_fakes / "parallel_core_ddp-0.1.0.dist-info" / "entry_points.txt").unlink()
    install_strategy("demo", settings="on: bool = False")
    config = make(demo_on=True)
    assert config.parallel_strategy == "ddp"
    assert msgspec.structs.replace(config, demo_on=False) == make() == pickle.loads(pickle.dumps(make()))
    assert repr(config) == (
        "DistributedConfig(parallel_strategy='ddp', backend='auto', timeout_seconds=600.0, demo_on=True)"
    )
    unknown = "unknown strategy 'ddp': installed are 'demo' (pc-fake 1.0), 'fsdp' (parallel-core-fsdp 0.1.0)"
    with pytest.raises(StrategyError, match=f"^{re.escape(unknown)}"):
        _ = config.options
    assert problems_of(parallel_strategy="ddp")[0].startswith(f"parallel_strategy: {unknown}")


def test_where_no_strategy_is_installed_there_are_the_core_s_settings(only_fakes: Path) -> None:
    for folder in only_fakes.glob("*.dist-info"):
        (folder / "entry_points.txt").unlink()
    registrations.cache_clear()
    assert make(backend="gloo") != make()
    assert problems_of(nope=1, fsdp_cpu_offload=True) == (
        f"nope: unknown setting; allowed are {CORE}",
        (
            "fsdp_cpu_offload: unknown setting; strategy 'fsdp' is not installed: "
            "no strategy is installed; `pip install parallel-core[all]` brings all of this project"
        ),
    )


def test_options_of_a_strategy_that_is_not_installed_are_an_error() -> None:
    with pytest.raises(StrategyError, match=r"^unknown strategy 'nope': installed are"):
        make().options_for("nope")


def test_the_class_is_the_same_until_other_strategies_are_installed(install_strategy: InstallStrategy) -> None:
    before = config_module.DistributedConfig
    assert config_module.DistributedConfig is before
    install_strategy("demo", settings="on: bool = False")
    assert config_module.DistributedConfig is not before
    assert make(demo_on=True).demo_on is True
    assert isinstance(make(), DistributedConfigBase)


def test_the_module_has_no_other_names_made_up_on_the_way() -> None:
    with pytest.raises(AttributeError, match=r"^module 'parallel_core\.config' has no attribute 'Distributed'$"):
        _ = config_module.Distributed  # type: ignore[attr-defined]  # the point of the test


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        # values
        ({"fsdp_mixed_precision": "fp8"}, "expected one of 'fp32', 'bf16' or 'fp16', found 'fp8'"),
        (
            {"fsdp_mixed_precision": "BF16"},
            "expected one of 'fp32', 'bf16' or 'fp16', found 'BF16'; did you mean 'bf16'?",
        ),
        (
            {"fsdp_mixed_precision": "float16"},
            "expected one of 'fp32', 'bf16' or 'fp16', found 'float16'; did you mean 'fp16'?",
        ),
        (
            {"fsdp_mixed_precision": "torch.bfloat16"},
            "expected one of 'fp32', 'bf16' or 'fp16', found 'torch.bfloat16'; did you mean 'bf16'?",
        ),
        ({"fsdp_mixed_precision": None}, "expected one of 'fp32', 'bf16' or 'fp16', found None"),
        ({"fsdp_auto_wrap_min_params": -1}, "expected an integer >= 0, found -1"),
        ({"fsdp_auto_wrap_min_params": 1e7}, "expected an integer >= 0, found 10000000.0; write 10_000_000"),
        ({"fsdp_auto_wrap_min_params": 0.5}, "expected an integer >= 0, found 0.5"),
        ({"fsdp_auto_wrap_min_params": True}, "expected an integer >= 0, found True"),
        ({"fsdp_auto_wrap_min_params": "8"}, "expected an integer >= 0, found '8'; write 8, without quotes"),
        ({"fsdp_cpu_offload": "true"}, "expected true or false, found 'true'; write true, without quotes"),
        ({"fsdp_cpu_offload": "no"}, "expected true or false, found 'no'; write false, without quotes"),
        ({"fsdp_cpu_offload": 1}, "expected true or false, found 1; write true"),
        ({"fsdp_cpu_offload": None}, "expected true or false, found None"),
        ({"ddp_bucket_cap_mb": 0}, "expected a number > 0 or null, found 0"),
        ({"ddp_bucket_cap_mb": "25"}, "expected a number > 0 or null, found '25'; write 25, without quotes"),
        ({"ddp_bucket_cap_mb": False}, "expected a number > 0 or null, found False"),
        ({"ddp_static_graph": [True]}, "expected true or false, found [True]"),
        ({"backend": "mpi"}, "expected one of 'auto', 'nccl' or 'gloo', found 'mpi'"),
        ({"backend": "NCCL"}, "expected one of 'auto', 'nccl' or 'gloo', found 'NCCL'; did you mean 'nccl'?"),
        ({"timeout_seconds": 0}, "expected a number > 0 and <= 31_536_000, found 0"),
        ({"timeout_seconds": 1e300}, "expected a number > 0 and <= 31_536_000, found 1e+300"),
        (
            {"timeout_seconds": float("inf")},
            "expected a number > 0 and <= 31_536_000, found inf; a setting is a finite number",
        ),
        ({"timeout_seconds": "10 min"}, "expected a number > 0 and <= 31_536_000, found '10 min'"),
        ({"parallel_strategy": 2}, "expected a string, found 2"),
        # the strategy's name
        (
            {"parallel_strategy": "fdsp"},
            f"unknown strategy 'fdsp': {INSTALLED}; did you mean 'fsdp'?",
        ),
        # names
        (
            {"fsdp_cpu_ofload": True},
            f"unknown setting of strategy 'fsdp'; allowed are {FSDP_FIELDS}; did you mean 'fsdp_cpu_offload'?",
        ),
        (
            {"ddp_cpu_offload": True},
            f"unknown setting of strategy 'ddp'; allowed are {DDP_FIELDS}; did you mean 'fsdp_cpu_offload'?",
        ),
        ({"ddp_zero": True}, f"unknown setting of strategy 'ddp'; allowed are {DDP_FIELDS}"),
        (
            {"FSDP_CPU_OFFLOAD": True},
            f"unknown setting of strategy 'fsdp'; allowed are {FSDP_FIELDS}; did you mean 'fsdp_cpu_offload'?",
        ),
        (
            {"fsdp2_cpu_offload": True},
            (
                "unknown setting; strategy 'fsdp2' is not installed: installed are 'ddp', 'fsdp'; "
                "did you mean 'fsdp_cpu_offload'?"
            ),
        ),
        ({"learning_rate": 0.1}, "unknown setting; strategy 'learning' is not installed: installed are 'ddp', 'fsdp'"),
        (
            {"cpu_offload": True},
            f"unknown setting; allowed are {CORE} and the settings of 'ddp', 'fsdp'; did you mean 'fsdp_cpu_offload'?",
        ),
        (
            {"min_params": 3},
            (
                f"unknown setting; allowed are {CORE} and the settings of 'ddp', 'fsdp'; "
                "did you mean 'fsdp_auto_wrap_min_params'?"
            ),
        ),
        (
            {"paralel_strategy": "fsdp"},
            f"unknown setting; allowed are {CORE} and the settings of 'ddp', 'fsdp'; did you mean 'parallel_strategy'?",
        ),
        (
            {"timeout": 60},
            f"unknown setting; allowed are {CORE} and the settings of 'ddp', 'fsdp'; did you mean 'timeout_seconds'?",
        ),
        ({"lr": 0.1}, f"unknown setting; allowed are {CORE} and the settings of 'ddp', 'fsdp'"),
        (
            {"fsdp": {"cpu_offload": True, "mixed_precision": "bf16"}},
            "settings are not nested; write fsdp_cpu_offload, fsdp_mixed_precision in place of the table",
        ),
        ({"fsdp": {}}, "settings are not nested; write fsdp_... in place of the table"),
    ],
)
def test_a_wrong_setting_is_one_line_that_says_what_is_allowed(fields: dict[str, Any], problem: str) -> None:
    (name,) = fields
    assert problems_of(**fields) == (f"{name}: {problem}",)


def test_one_error_lists_all_problems_in_the_order_of_the_settings(install_strategy: InstallStrategy) -> None:
    install_strategy("rules", settings=RULES)
    with pytest.raises(ConfigError) as refused:
        make(rules_first=3, fsdp_cpu_offload=1, nope=2, parallel_strategy="dpp")
    assert str(refused.value) == (
        "4 problems in the configuration:\n"
        "  - fsdp_cpu_offload: expected true or false, found 1; write true\n"
        f"  - nope: unknown setting; allowed are {CORE} and the settings of 'ddp', 'fsdp', 'rules'\n"
        "  - parallel_strategy: unknown strategy 'dpp': installed are 'ddp' (parallel-core-ddp 0.1.0), "
        "'fsdp' (parallel-core-fsdp 0.1.0), 'rules' (pc-fake 1.0); did you mean 'ddp'?\n"
        "  - rules: first must be below second (2), found 3"
    )
    assert isinstance(refused.value.__cause__, StrategyError)


def test_a_strategy_s_rules_hold_whether_it_is_chosen_or_not(install_strategy: InstallStrategy) -> None:
    install_strategy("rules", settings=RULES)
    assert make(rules_first=3, rules_second=4).rules_second == 4
    expected = ("rules: first must be below second (2), found 3",)
    assert problems_of(rules_first=3) == expected
    assert problems_of(rules_first=3, parallel_strategy="rules") == expected
    for door in (
        lambda: msgspec.structs.replace(make(), rules_first=3),
        lambda: msgspec.convert({"rules_first": 3}, config_module.DistributedConfig),
    ):
        with pytest.raises(ConfigError) as refused:
            door()
        assert refused.value.problems == expected


def test_rules_are_not_asked_about_a_strategy_with_a_wrong_setting(install_strategy: InstallStrategy) -> None:
    install_strategy("rules", settings=RULES)
    assert problems_of(rules_first=3, rules_second="4") == (
        "rules_second: expected an integer, found '4'; write 4, without quotes",
    )


@pytest.mark.parametrize("door", ["replace", "convert"])
def test_the_other_doors_refuse_too(door: str) -> None:
    def change(**changes: Any) -> object:
        if door == "convert":
            return msgspec.convert(changes, config_module.DistributedConfig)
        return msgspec.structs.replace(make(), **changes)

    assert change(fsdp_cpu_offload=True) == make(fsdp_cpu_offload=True)
    for changes in ({"fsdp_auto_wrap_min_params": -1}, {"fsdp_cpu_offload": "no"}, {"timeout_seconds": True}):
        with pytest.raises(msgspec.ValidationError if door == "convert" else ConfigError):
            change(**changes)
    # msgspec refuses a name that is no field before it asks anything of the class.
    with pytest.raises(msgspec.ValidationError if door == "convert" else TypeError, match="fsdp_cpu_oflload"):
        change(fsdp_cpu_oflload=True)
    with pytest.raises(ConfigError) as refused:
        change(parallel_strategy="fdsp")
    assert str(refused.value) == f"parallel_strategy: unknown strategy 'fdsp': {INSTALLED}; did you mean 'fsdp'?"
    assert isinstance(refused.value.__cause__, StrategyError)


def test_replace_lists_all_values_that_are_wrong() -> None:
    with pytest.raises(ConfigError) as refused:
        msgspec.structs.replace(make(), backend="NCCL", timeout_seconds=-1)
    assert refused.value.problems == (
        "backend: expected one of 'auto', 'nccl' or 'gloo', found 'NCCL'; did you mean 'nccl'?",
        "timeout_seconds: expected a number > 0 and <= 31_536_000, found -1",
    )


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        config_module.DistributedConfig({"backend": "gloo"})  # type: ignore[call-arg]  # the point of the test
    assert str(refused.value) == "DistributedConfig: expected keyword arguments only, found 1 positional"


BROKEN = (
    "strategy 'bad' (pc-bad 2.0) failed to load from 'fake_bad_pc_bad': ModuleNotFoundError: No module named 'nosuch'; "
    "repair or uninstall pc-bad"
)


def test_a_broken_strategy_adds_no_fields_and_its_own_error_is_given_for_them(
    install_strategy: InstallStrategy,
) -> None:
    install_strategy("bad", "import nosuch", distribution="pc-bad", version="2.0")
    assert make(parallel_strategy="fsdp").parallel_strategy == "fsdp"
    assert problems_of(bad_speed=3) == (f"bad_speed: {BROKEN}",)
    assert problems_of(bad={"speed": 3}) == (f"bad: {BROKEN}",)
    with pytest.raises(ConfigError) as refused:
        make(parallel_strategy="bad")
    assert str(refused.value) == f"parallel_strategy: {BROKEN}"
    assert isinstance(refused.value.__cause__, StrategyError)
    assert isinstance(refused.value.__cause__.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("name", "settings", "clash"),
    [("timeout", "seconds: int = 3", "seconds"), ("parallel", "strategy: str = ''", "strategy")],
)
def test_a_strategy_whose_field_is_the_core_s_is_listed_with_an_error_and_the_rest_goes_on(
    install_strategy: InstallStrategy, name: str, settings: str, clash: str
) -> None:
    install_strategy(name, settings=settings, distribution="pc-clash")
    assert make(timeout_seconds=5, parallel_strategy="fsdp").timeout_seconds == 5
    (error,) = (str(found.error) for found in available_strategies() if found.name == name)
    assert error == (
        f"strategy '{name}' (pc-clash 1.0): hook strategy_config: FakeConfig.{clash}: "
        f"its name in a config file, '{name}_{clash}', is the core's own"
    )
    assert problems_of(parallel_strategy=name) == (f"parallel_strategy: {error}",)


def test_a_strategy_may_be_called_like_the_start_of_a_core_field(install_strategy: InstallStrategy) -> None:
    install_strategy("timeout", settings="minutes: int = 3")
    config = make(timeout_minutes=4, timeout_seconds=5)
    assert config.options_for("timeout").minutes == 4


def test_two_strategies_whose_name_one_is_the_start_of_keep_their_fields_apart(
    install_strategy: InstallStrategy,
) -> None:
    install_strategy("fsdp2", settings="cpu_offload: bool = False")
    config = make(fsdp2_cpu_offload=True)
    assert not config.options_for("fsdp").cpu_offload
    assert config.options_for("fsdp2").cpu_offload


def test_a_default_made_by_a_function_stays_one(install_strategy: InstallStrategy) -> None:
    settings = 'names: tuple[str, ...] = __import__("msgspec").field(default_factory=lambda: ("a",))'
    install_strategy("demo", settings=settings)
    assert make().demo_names == ("a",)


def test_it_prints_in_one_line_what_matters() -> None:
    assert repr(make(parallel_strategy="fsdp", ddp_static_graph=True, timeout_seconds=60)) == (
        "DistributedConfig(parallel_strategy='fsdp', backend='auto', timeout_seconds=60.0, ddp_static_graph=True, "
        "fsdp_mixed_precision='bf16', fsdp_auto_wrap_min_params=10000000, fsdp_cpu_offload=False, "
        "fsdp_sync_module_states=True)"
    )


def test_it_is_immutable_comparable_and_hashable() -> None:
    config = make(fsdp_cpu_offload=True)
    with pytest.raises(AttributeError):
        config.backend = "gloo"
    assert config == make(fsdp_cpu_offload=True) != make()
    assert len({config, make(fsdp_cpu_offload=True), make()}) == 2


@pytest.mark.parametrize("again", [lambda config: pickle.loads(pickle.dumps(config)), copy.copy, copy.deepcopy])
def test_it_is_the_same_after_pickling_and_copying(
    install_strategy: InstallStrategy, again: Callable[[object], object]
) -> None:
    install_strategy("demo", settings='color: Enum("Color", {"RED": "red"}) | None = None\nnames: tuple[str, ...] = ()')
    config = make(parallel_strategy="fsdp", ddp_bucket_cap_mb=3, demo_names=["a"])
    assert again(config) == config


def test_it_pickles_into_a_process_that_lacks_a_strategy_which_plays_no_part(
    install_strategy: InstallStrategy, only_fakes: Path
) -> None:
    install_strategy("demo", settings="on: bool = False")
    silent, telling = pickle.dumps(make(parallel_strategy="fsdp")), pickle.dumps(make(demo_on=True))
    (only_fakes / "pc_fake-1.0.dist-info" / "entry_points.txt").unlink()
    install_strategy("other", settings="on: bool = False", distribution="pc-other")
    assert pickle.loads(silent) == make(parallel_strategy="fsdp")
    with pytest.raises(ConfigError, match=r"^demo_on: unknown setting; strategy 'demo' is not installed"):
        pickle.loads(telling)


IN_ANOTHER_PROCESS = """
import pickle, sys
config = pickle.load(sys.stdin.buffer)
assert config.options.names == ("a",), config
print(type(config).__module__, config.parallel_strategy, "torch" in sys.modules)
sys.stdout.flush()
sys.stdout.buffer.write(pickle.dumps(config))
"""


def test_it_crosses_into_another_process_and_back(install_strategy: InstallStrategy, only_fakes: Path) -> None:
    # The other process sees what is really installed too, and composes a class of its own.
    install_strategy("demo", settings=RULES)
    config = make(parallel_strategy="demo", demo_names=["a"], backend="gloo")
    run = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        input=pickle.dumps(config),
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(only_fakes), *sys.path])},
    )
    said, _, pickled = run.stdout.partition(b"\n")
    assert said == b"parallel_core.config demo False"
    assert pickle.loads(pickled) == config


def test_it_crosses_a_spawned_process(install_strategy: InstallStrategy) -> None:
    install_strategy("demo", settings=RULES)
    config = make(parallel_strategy="demo", demo_names=["a"])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(repr, (config,)) == repr(config)
        assert pool.apply(copy.copy, (config,)) == config
