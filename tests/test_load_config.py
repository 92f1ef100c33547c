"""`load_config`: a file, the environment and overrides; every problem with its place, all of them at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from parallel_core import config as config_module
from parallel_core.config import SettingOrigin, load_config, trace_config
from parallel_core.errors import ConfigError, StrategyError

pytestmark = pytest.mark.usefixtures("ddp_and_fsdp", "here")

InstallStrategy = Callable[..., str]

CORE = "'parallel_strategy', 'backend', 'timeout_seconds'"
FSDP_FIELDS = "'fsdp_mixed_precision', 'fsdp_auto_wrap_min_params', 'fsdp_cpu_offload', 'fsdp_sync_module_states'"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read `parallel.toml` and the like from a folder of their own."""
    monkeypatch.chdir(tmp_path)


def make(**fields: Any) -> Any:
    return config_module.DistributedConfig(**fields)


def problems_of(*arguments: Any, **options: Any) -> tuple[str, ...]:
    options.setdefault("environ", {})
    with pytest.raises(ConfigError) as refused:
        load_config(*arguments, **options)
    return refused.value.problems


TOML = """
parallel_strategy = "fsdp"
backend = "gloo"
timeout_seconds = 60
fsdp_auto_wrap_min_params = 1_000
ddp_bucket_cap_mb = 5e-1
"""

YAML = """
parallel_strategy: fsdp
backend: gloo
timeout_seconds: 60
fsdp_auto_wrap_min_params: 1_000
ddp_bucket_cap_mb: 5e-1
"""

JSON = """{
"parallel_strategy": "fsdp", "backend": "gloo", "timeout_seconds": 60, "fsdp_auto_wrap_min_params": 1000,
"ddp_bucket_cap_mb": 5e-1}
"""

BOM = "\N{ZERO WIDTH NO-BREAK SPACE}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("parallel.toml", TOML),
        ("parallel.TOML", TOML),
        ("parallel.yaml", YAML),
        ("parallel.yml", YAML),
        ("parallel.json", JSON),
        ("parallel.toml", BOM + TOML),
        ("parallel.yaml", BOM + YAML),
        ("parallel.json", BOM + JSON),
    ],
)
def test_the_three_formats_say_the_same(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")
    expected = make(
        parallel_strategy="fsdp",
        backend="gloo",
        timeout_seconds=60,
        fsdp_auto_wrap_min_params=1_000,
        ddp_bucket_cap_mb=0.5,
    )
    assert load_config(name, environ={}) == load_config(Path(name).absolute(), environ={}) == expected


def test_an_installed_strategy_s_lists_come_from_every_source(install_strategy: InstallStrategy) -> None:
    install_strategy("demo", settings="names: tuple[str, ...] | None = None")
    for name, text in (
        ("a.toml", 'demo_names = ["a"]'),
        ("a.yaml", "demo_names:\n  - a"),
        ("a.json", '{"demo_names": ["a"]}'),
    ):
        Path(name).write_text(text)
        assert load_config(name, environ={}) == make(demo_names=("a",))
    assert load_config(environ={"PARALLEL_CORE_DEMO_NAMES": '["a"]'}) == make(demo_names=("a",))
    assert load_config("a.toml", environ={}, overrides=["demo_names = null"]) == make()


@pytest.mark.parametrize(
    ("name", "text", "table"),
    [
        ("a.toml", "", None),
        ("a.toml", "# nothing\n", None),
        ("a.yaml", "", None),
        ("a.yaml", "---\n# nothing\n", None),
        ("a.json", "", None),
        ("a.json", "{}", None),
        ("a.json", "null", None),
        ("a.toml", "[distributed]\n", "distributed"),
        ("a.yaml", "distributed:\n", "distributed"),
        ("a.json", '{"training": {"distributed": {}}}', "training.distributed"),
    ],
)
def test_a_file_or_a_table_without_settings_leaves_the_defaults(name: str, text: str, table: str | None) -> None:
    Path(name).write_text(text)
    assert load_config(name, table, environ={}) == make()


def test_no_file_at_all_leaves_the_defaults() -> None:
    assert load_config(environ={}) == make()


def test_settings_may_stand_in_a_table_beside_other_people_s() -> None:
    Path("a.toml").write_text('lr = 1\n[distributed]\nbackend = "gloo"\n[training.distributed]\nbackend = "nccl"\n')
    assert load_config("a.toml", "distributed", environ={}).backend == "gloo"
    assert load_config("a.toml", table="training.distributed", environ={}).backend == "nccl"
    Path("b.toml").write_text('["a.b"]\nbackend = "gloo"\n[c."d.e"]\nbackend = "nccl"\n[c.d]\n')
    assert load_config("b.toml", "a.b", environ={}).backend == "gloo"
    assert load_config("b.toml", "c.d", environ={}).backend == "auto"
    Path("b.toml").write_text('[c."d.e"]\nbackend = "nccl"\n')
    assert load_config("b.toml", "c.d.e", environ={}).backend == "nccl"


# What a person writes into a file, and the whole of what they are told.
IN_A_FILE = [
    ('fsdp_mixed_precision = "fp8"', "fsdp_mixed_precision: expected one of 'fp32', 'bf16' or 'fp16', found 'fp8'"),
    (
        "fsdp_auto_wrap_min_params = 1e7",
        "fsdp_auto_wrap_min_params: expected an integer >= 0, found 10000000.0; write 10_000_000",
    ),
    ("fsdp_auto_wrap_min_params = true", "fsdp_auto_wrap_min_params: expected an integer >= 0, found True"),
    ("fsdp_auto_wrap_min_params = -1", "fsdp_auto_wrap_min_params: expected an integer >= 0, found -1"),
    (
        'fsdp_cpu_offload = "false"',
        "fsdp_cpu_offload: expected true or false, found 'false'; write false, without quotes",
    ),
    ("fsdp_cpu_offload = 0", "fsdp_cpu_offload: expected true or false, found 0; write false"),
    (
        "timeout_seconds = nan",
        "timeout_seconds: expected a number > 0 and <= 31_536_000, found nan; a setting is a finite number",
    ),
    (
        "timeout_seconds = 2026-12-01",
        "timeout_seconds: expected a number > 0 and <= 31_536_000, found datetime.date(2026, 12, 1)",
    ),
    (
        'parallel_strategy = "fsdp2"',
        (
            "parallel_strategy: unknown strategy 'fsdp2': installed are 'ddp' (parallel-core-ddp 0.1.0), "
            "'fsdp' (parallel-core-fsdp 0.1.0); did you mean 'fsdp'?"
        ),
    ),
    (
        "fsdp_cpu_ofload = true",
        (
            f"fsdp_cpu_ofload: unknown setting of strategy 'fsdp'; allowed are {FSDP_FIELDS}; "
            "did you mean 'fsdp_cpu_offload'?"
        ),
    ),
    (
        "fsdp2_cpu_offload = true",
        (
            "fsdp2_cpu_offload: unknown setting; strategy 'fsdp2' is not installed: installed are 'ddp', 'fsdp'; "
            "did you mean 'fsdp_cpu_offload'?"
        ),
    ),
    (
        "[fsdp]\ncpu_offload = true\nmixed_precision = 'bf16'",
        "fsdp: settings are not nested; write fsdp_cpu_offload, fsdp_mixed_precision in place of the table",
    ),
    (
        "fsdp.cpu_offload = true",
        "fsdp: settings are not nested; write fsdp_cpu_offload in place of the table",
    ),
]


@pytest.mark.parametrize(("text", "problem"), IN_A_FILE)
def test_a_problem_in_a_file_says_the_file_and_the_setting(text: str, problem: str) -> None:
    Path("parallel.toml").write_text(text)
    assert problems_of("parallel.toml") == (f"parallel.toml: {problem}",)


@pytest.mark.parametrize(("text", "problem"), [line for line in IN_A_FILE if not line[0].startswith("[")])
def test_a_problem_in_a_table_says_the_table_too(text: str, problem: str) -> None:
    Path("parallel.toml").write_text(f"[training.distributed]\n{text}")
    assert problems_of("parallel.toml", "training.distributed") == (f"parallel.toml: training.distributed.{problem}",)


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (
            "a.yaml",
            "fsdp_cpu_offload: no",
            "fsdp_cpu_offload: expected true or false, found 'no'; write false, without quotes",
        ),
        ("a.yaml", "fsdp_cpu_offload:", "fsdp_cpu_offload: expected true or false, found None"),
        ("a.yaml", "timeout_seconds: 12:30", "timeout_seconds: expected a number > 0 and <= 31_536_000, found '12:30'"),
        (
            "a.yaml",
            "timeout_seconds: .inf",
            "timeout_seconds: expected a number > 0 and <= 31_536_000, found inf; a setting is a finite number",
        ),
        (
            "a.yaml",
            "fsdp_auto_wrap_min_params: 1e7",
            "fsdp_auto_wrap_min_params: expected an integer >= 0, found 10000000.0; write 10_000_000",
        ),
        ("a.yaml", "backend: &a [*a]", "backend: expected one of 'auto', 'nccl' or 'gloo', found [[...]]"),
        ("a.yaml", "7: 8", "7: expected the name of a setting, found 7"),
        ("a.yaml", "null: 8", "None: expected the name of a setting, found None"),
        (
            "a.json",
            '{"timeout_seconds": 1e999}',
            "timeout_seconds: expected a number > 0 and <= 31_536_000, found inf; a setting is a finite number",
        ),
        # files that can't be read as what they say they are
        ("a.toml", 'backend = "gloo"\ntimeout_seconds =\n', "not valid TOML: Invalid value (at line 2, column 18)"),
        (
            "a.toml",
            "backend = 'gloo'\nbackend = 'nccl'",
            "not valid TOML: Cannot overwrite a value (at the end, line 2)",
        ),
        (
            "a.yaml",
            "backend: gloo\nx: [1\n",
            "not valid YAML: expected ',' or ']', but got '<stream end>' (at line 3, column 1)",
        ),
        (
            "a.yaml",
            "a: b\n\tc: d",
            "not valid YAML: found character '\\t' that cannot start any token (at line 2, column 1)",
        ),
        (
            "a.yaml",
            "backend: gloo\nbackend: nccl",
            (
                'not valid YAML: found duplicate key "backend" with value "nccl" (original value: "gloo") '
                "(at line 2, column 1)"
            ),
        ),
        (
            "a.yaml",
            "backend: gloo\n---\nbackend: nccl",
            (
                "not valid YAML: expected a single document in the stream, but found another document "
                "(at line 2, column 1)"
            ),
        ),
        ("a.yaml", "a: !!bool x", "not valid YAML: KeyError: 'x'"),
        (
            "a.yaml",
            "a: \x00",
            (
                "not valid YAML: ReaderError: unacceptable character #x0000: special characters are not allowed "
                'in "<unicode string>", position 3'
            ),
        ),
        ("a.json", '{"backend": "gloo",\n "x": }', "not valid JSON: Expecting value (at line 2, column 7)"),
        ("a.json", '{"backend": "gloo", "backend": "nccl"}', "the key 'backend' is given twice"),
        ("a.json", '{"timeout_seconds": NaN}', "not valid JSON: NaN is no number in JSON"),
        ("a.toml", "x = " + "[" * 100_000, "is nested too deeply"),
        ("a.yaml", "[" * 600, "is nested too deeply"),
        ("a.json", "[" * 100_000, "is nested too deeply"),
        # something else than settings at the top
        ("a.yaml", "- backend: gloo", "expected settings at the top, found a list"),
        ("a.json", "[]", "expected settings at the top, found a list"),
        ("a.yaml", "gloo", "expected settings at the top, found 'gloo'"),
        ("a.json", "0", "expected settings at the top, found 0"),
        # what the file is called
        ("a.ini", "", "expected a file that ends in .toml, .yaml, .yml or .json, found '.ini'"),
        ("parallel", "", "expected a file that ends in .toml, .yaml, .yml or .json, found no ending"),
    ],
)
def test_each_format_s_own_mistakes_are_found(name: str, text: str, problem: str) -> None:
    Path(name).write_text(text)
    assert problems_of(name) == (f"{name}: {problem}",)


def test_an_integer_of_thousands_of_digits_is_an_error_of_the_file() -> None:
    for name, text in (("a.toml", "x = {}"), ("a.yaml", "x: {}"), ("a.json", '{{"x": {}}}')):
        Path(name).write_text(text.format("9" * 5000))
        problem = f"{name}: not valid {name[2:].upper()}: found an integer of more than 4300 digits"
        assert problems_of(name) == (problem,)


def test_an_integer_of_thousands_of_digits_in_hexadecimal_is_no_value() -> None:
    digits = f"0x{'f' * 5000}"
    found = "an integer of thousands of digits"
    Path("a.toml").write_text(
        f"backend = {digits}\nddp_bucket_cap_mb = [{digits}]\nfsdp_auto_wrap_min_params = {digits}"
    )
    assert problems_of("a.toml") == (
        f"a.toml: backend: expected one of 'auto', 'nccl' or 'gloo', found {found}",
        f"a.toml: ddp_bucket_cap_mb: expected a number > 0 or null, found a list with {found}",
        f"a.toml: fsdp_auto_wrap_min_params: expected an integer >= 0, found {found}",
    )
    Path("a.yaml").write_text(digits)
    assert problems_of("a.yaml") == (f"a.yaml: expected settings at the top, found {found}",)
    Path("a.yaml").write_text(f"? {digits}\n: 1")
    assert problems_of("a.yaml") == (f"a.yaml: {found}: expected the name of a setting, found {found}",)


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    assert problems_of("conf/parallel.toml") == (
        f"conf/parallel.toml: no such file; looked for {tmp_path}/conf/parallel.toml",
    )
    assert problems_of(tmp_path / "parallel.toml") == (f"{tmp_path}/parallel.toml: no such file",)


def test_what_is_no_readable_file_is_an_error_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("folder.toml").mkdir()
    assert problems_of("folder.toml") == ("folder.toml: expected a file, found a directory",)
    Path("latin.toml").write_bytes('backend = "gl\N{LATIN SMALL LETTER O WITH DIAERESIS}"'.encode("latin-1"))
    assert problems_of("latin.toml") == ("latin.toml: expected text in UTF-8, found the byte 0xf6",)
    assert problems_of("nul\0.toml") == ("nul\0.toml: can't be read: embedded null byte",)
    assert problems_of("latin.toml/a.toml") == ("latin.toml/a.toml: can't be read: Not a directory",)
    for length in (300, 5000):
        name = f"{'a' * length}.toml"
        assert problems_of(name) == (f"{name}: can't be read: File name too long",)

    def refuse(path: Path) -> object:
        raise PermissionError(13, "Permission denied")

    for method in ("read_bytes", "stat"):  # the file, and the folder that it is in
        monkeypatch.setattr(Path, method, refuse)
        assert problems_of("secret.toml") == ("secret.toml: can't be read: Permission denied",)


def test_yaml_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.yaml").write_text("backend: gloo")
    monkeypatch.setitem(sys.modules, "ruamel.yaml", None)
    assert problems_of("a.yaml") == ("a.yaml: YAML needs ruamel.yaml; `pip install parallel-core[yaml]` brings it",)


TABLES = """
lr = 0.1
several = [1]
[distributed]
backend = "gloo"
[training.optimizer]
lr = 0.1
"""


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        (
            "distribted",
            "no table 'distribted'; the tables at the top are 'distributed', 'training'; did you mean 'distributed'?",
        ),
        ("training.dist", "no table 'training.dist'; the tables in 'training' are 'optimizer'"),
        ("training.optimizer.x", "no table 'training.optimizer.x'; there is none in 'training.optimizer'"),
        ("lr", "expected a table 'lr', found 0.1"),
        ("lr.x", "expected a table 'lr', found 0.1"),
        ("several", "expected a table 'several', found a list"),
        ("training.optimizer.lr", "expected a table 'training.optimizer.lr', found 0.1"),
        ("", "no table ''; the tables at the top are 'distributed', 'training'"),
    ],
)
def test_a_missing_table_is_an_error_that_names_those_there_are(table: str, problem: str) -> None:
    Path("a.toml").write_text(TABLES)
    assert problems_of("a.toml", table) == (f"a.toml: {problem}",)


def test_a_table_needs_a_file() -> None:
    assert problems_of(table="distributed") == (
        "table='distributed': expected a file to look for it in, found path=None",
    )


def test_a_table_that_is_no_setting_gives_the_hint_to_name_it() -> None:
    Path("a.toml").write_text(TABLES)
    assert problems_of("a.toml") == (
        f"a.toml: lr: unknown setting; allowed are {CORE} and the settings of 'ddp', 'fsdp'",
        f"a.toml: several: unknown setting; allowed are {CORE} and the settings of 'ddp', 'fsdp'",
        "a.toml: distributed: unknown setting; it is a table: table='distributed' reads the settings in it",
        "a.toml: training: unknown setting; it is a table: table='training' reads the settings in it",
    )
    assert problems_of("a.toml", "training") == (
        (
            "a.toml: training.optimizer: unknown setting; it is a table: "
            "table='training.optimizer' reads the settings in it"
        ),
    )


@pytest.mark.parametrize(
    ("variable", "text", "problem"),
    [
        ("FSDP_CPU_OFFLOAD", "maybe", "expected true or false, found 'maybe'"),
        ("FSDP_CPU_OFFLOAD", "True", "expected true or false, found 'True'; write true"),
        ("FSDP_CPU_OFFLOAD", "1", "expected true or false, found '1'; write true"),
        ("FSDP_CPU_OFFLOAD", "", "expected true or false, found ''"),
        ("FSDP_CPU_OFFLOAD", "true\nbackend = 'gloo'", "expected true or false, found \"true\\nbackend = 'gloo'\""),
        ("FSDP_AUTO_WRAP_MIN_PARAMS", "1e7", "expected an integer >= 0, found '1e7'; write 10_000_000"),
        ("BACKEND", "mpi", "expected one of 'auto', 'nccl' or 'gloo', found 'mpi'"),
        (
            "PARALLEL_STRATEGY",
            "fdsp",
            (
                "unknown strategy 'fdsp': installed are 'ddp' (parallel-core-ddp 0.1.0), "
                "'fsdp' (parallel-core-fsdp 0.1.0); did you mean 'fsdp'?"
            ),
        ),
        (
            "FSDP_CPU_OFLOAD",
            "1",
            (
                "unknown setting of strategy 'fsdp'; allowed are 'PARALLEL_CORE_FSDP_MIXED_PRECISION', "
                "'PARALLEL_CORE_FSDP_AUTO_WRAP_MIN_PARAMS', 'PARALLEL_CORE_FSDP_CPU_OFFLOAD', "
                "'PARALLEL_CORE_FSDP_SYNC_MODULE_STATES'; did you mean 'PARALLEL_CORE_FSDP_CPU_OFFLOAD'?"
            ),
        ),
        (
            "FSDP2_CPU_OFFLOAD",
            "true",
            (
                "unknown setting; strategy 'fsdp2' is not installed: installed are 'ddp', 'fsdp'; "
                "did you mean 'PARALLEL_CORE_FSDP_CPU_OFFLOAD'?"
            ),
        ),
        (
            "BACKND",
            "gloo",
            (
                "unknown setting; allowed are 'PARALLEL_CORE_PARALLEL_STRATEGY', 'PARALLEL_CORE_BACKEND', "
                "'PARALLEL_CORE_TIMEOUT_SECONDS' and the settings of 'ddp', 'fsdp'; "
                "did you mean 'PARALLEL_CORE_BACKEND'?"
            ),
        ),
        (
            "Backend",
            "gloo",
            "expected a name in capitals; did you mean 'PARALLEL_CORE_BACKEND'?",
        ),
        (
            "backend",
            "gloo",
            "expected a name in capitals; did you mean 'PARALLEL_CORE_BACKEND'?",
        ),
    ],
)
def test_a_problem_in_the_environment_says_the_variable(variable: str, text: str, problem: str) -> None:
    name = f"PARALLEL_CORE_{variable}"
    assert problems_of(environ={name: text, "OTHER": "x"}) == (f"environment: {name}: {problem}",)


def test_a_broken_strategy_s_variable_gets_that_strategy_s_error(install_strategy: InstallStrategy) -> None:
    install_strategy("bad", "import nosuch", distribution="pc-bad")
    with pytest.raises(ConfigError) as refused:
        load_config(environ={"PARALLEL_CORE_BAD_SPEED": "3"})
    assert str(refused.value) == (
        "environment: PARALLEL_CORE_BAD_SPEED: strategy 'bad' (pc-bad 1.0) failed to load from 'fake_bad_pc_bad': "
        "ModuleNotFoundError: No module named 'nosuch'; repair or uninstall pc-bad"
    )
    assert isinstance(refused.value.__cause__, StrategyError)


def test_the_environment_is_the_process_s_own_if_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLEL_CORE_FSDP_CPU_OFFLOAD", "true")
    assert load_config() == make(fsdp_cpu_offload=True)
    assert make() == load_config(environ={}), "only load_config reads the environment"


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("fsdp_cpu_offload=maybe", "override 'fsdp_cpu_offload=maybe': expected true or false, found 'maybe'"),
        ("fsdp_cpu_offload", "override 'fsdp_cpu_offload': expected a string such as 'name=value'"),
        (("backend", "gloo"), "override ('backend', 'gloo'): expected a string such as 'name=value'"),
        (
            "timeout_seconds=1, 2",
            "override 'timeout_seconds=1, 2': expected a number > 0 and <= 31_536_000, found '1, 2'",
        ),
        (
            "--backend=gloo",
            (
                f"override '--backend=gloo': unknown setting; allowed are {CORE} and the settings of 'ddp', 'fsdp'; "
                "did you mean 'backend'?"
            ),
        ),
        (
            "fsdp.cpu_offload=true",
            (
                f"override 'fsdp.cpu_offload=true': unknown setting of strategy 'fsdp'; allowed are {FSDP_FIELDS}; "
                "did you mean 'fsdp_cpu_offload'?"
            ),
        ),
        (
            "train.lr_decay=1",
            f"override 'train.lr_decay=1': unknown setting; allowed are {CORE} and the settings of 'ddp', 'fsdp'",
        ),
        (
            "PARALLEL_CORE_=1",
            f"override 'PARALLEL_CORE_=1': unknown setting; allowed are {CORE} and the settings of 'ddp', 'fsdp'",
        ),
        (
            "fsdp3-cpu_offload=true",
            (
                f"override 'fsdp3-cpu_offload=true': unknown setting; allowed are {CORE} and the settings of 'ddp', "
                "'fsdp'; did you mean 'fsdp_cpu_offload'?"
            ),
        ),
        (
            "PARALLEL_CORE_BACKEND=gloo",
            (
                f"override 'PARALLEL_CORE_BACKEND=gloo': unknown setting; allowed are {CORE} and the settings of "
                "'ddp', 'fsdp'; did you mean 'backend'?"
            ),
        ),
        (
            "PARALLEL_CORE_FSDP_CPU_OFFLOAD=true",
            (
                "override 'PARALLEL_CORE_FSDP_CPU_OFFLOAD=true': unknown setting of strategy 'fsdp'; allowed are "
                f"{FSDP_FIELDS}; did you mean 'fsdp_cpu_offload'?"
            ),
        ),
        ("=gloo", f"override '=gloo': unknown setting; allowed are {CORE} and the settings of 'ddp', 'fsdp'"),
        (
            "parallel_strategy=dpp",
            (
                "override 'parallel_strategy=dpp': unknown strategy 'dpp': installed are "
                "'ddp' (parallel-core-ddp 0.1.0), 'fsdp' (parallel-core-fsdp 0.1.0); did you mean 'ddp'?"
            ),
        ),
        (
            "parallel_strategy=FSDP",
            (
                "override 'parallel_strategy=FSDP': unknown strategy 'FSDP': installed are "
                "'ddp' (parallel-core-ddp 0.1.0), 'fsdp' (parallel-core-fsdp 0.1.0); did you mean 'fsdp'?"
            ),
        ),
    ],
)
def test_a_problem_in_an_override_says_the_override(override: Any, problem: str) -> None:
    assert problems_of(overrides=[override]) == (problem,)


def test_one_string_in_place_of_a_list_of_overrides_is_refused() -> None:
    assert problems_of(overrides="backend=gloo") == (
        "overrides: expected a list of strings such as 'name=value', found the string 'backend=gloo'",
    )


def test_a_pipe_is_no_file() -> None:
    """It may never have an end."""
    os.mkfifo("a.toml")
    assert problems_of("a.toml") == ("a.toml: expected a file, found a pipe or a device",)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"path": 3}, "path: expected the path of a file, found 3"),
        ({"path": b"a.toml"}, "path: expected the path of a file, found b'a.toml'"),
        ({"path": "a.toml", "table": 3}, "table: expected the name of a table, found 3"),
        ({"overrides": None}, "overrides: expected a list of strings such as 'name=value', found None"),
        ({"overrides": 3}, "overrides: expected a list of strings such as 'name=value', found 3"),
        ({"environ": ["a"]}, "environ: expected a dict of variables, found ['a']"),
        (
            {"environ": {"PARALLEL_CORE_BACKEND": 3, 4: "x", "HOME": None}},
            "environment: PARALLEL_CORE_BACKEND: expected a text, as all variables have, found 3",
        ),
    ],
)
def test_arguments_of_the_wrong_kind_are_problems_like_the_others(options: dict[str, Any], problem: str) -> None:
    Path("a.toml").write_text("")
    assert problems_of(**options) == (problem,)


def test_overrides_may_have_blanks_around_name_and_value() -> None:
    assert load_config(environ={}, overrides=[" fsdp_cpu_offload = true "]) == make(fsdp_cpu_offload=True)


def test_overrides_win_over_the_environment_which_wins_over_the_file() -> None:
    Path("a.toml").write_text('backend = "nccl"\ntimeout_seconds = 1\nfsdp_auto_wrap_min_params = 1\n')
    environ = {"PARALLEL_CORE_TIMEOUT_SECONDS": "2", "PARALLEL_CORE_FSDP_AUTO_WRAP_MIN_PARAMS": "2"}
    overrides = ["fsdp_auto_wrap_min_params=4", "fsdp_auto_wrap_min_params=3"]
    assert load_config("a.toml", environ=environ, overrides=overrides) == make(
        backend="nccl", timeout_seconds=2, fsdp_auto_wrap_min_params=3
    )


def test_a_trace_says_where_each_value_came_from(install_strategy: InstallStrategy) -> None:
    install_strategy("demo", settings='names: tuple[str, ...] = ("a",)')
    Path("a.toml").write_text('[distributed]\nbackend = "nccl"\ntimeout_seconds = 1\nfsdp_cpu_offload = true\n')
    traced = trace_config(
        "a.toml",
        "distributed",
        environ={"PARALLEL_CORE_TIMEOUT_SECONDS": "2", "PARALLEL_CORE_FSDP_CPU_OFFLOAD": "false"},
        overrides=["fsdp_cpu_offload=true"],
    )
    assert [each for each in traced if each.origin != "default"] == [
        SettingOrigin("backend", "nccl", "a.toml"),
        SettingOrigin("timeout_seconds", 2.0, "environment: PARALLEL_CORE_TIMEOUT_SECONDS"),
        SettingOrigin("fsdp_cpu_offload", True, "override"),
    ]
    assert SettingOrigin("demo_names", ("a",), "default") in traced


def test_a_trace_refuses_what_load_config_refuses() -> None:
    with pytest.raises(ConfigError, match=r"^override 'backend=mpi': expected one of"):
        trace_config(environ={}, overrides=["backend=mpi"])


RULES = """
first: int = 1
second: int = 2

def problems(self):
    if self.first >= self.second:
        yield f"first must be below second ({self.second}), found {self.first}"
"""


def test_all_problems_of_all_sources_are_in_one_error_in_their_order(install_strategy: InstallStrategy) -> None:
    install_strategy("rules", settings=RULES)
    Path("a.toml").write_text('[distributed]\nbackend = "mpi"\nrules_first = 3\nfsdp_cpu_offload = "no"\n')
    with pytest.raises(ConfigError) as refused:
        load_config(
            "a.toml",
            "distributed",
            environ={"PARALLEL_CORE_DDP_STATIC_GRAPH": "on", "PARALLEL_CORE_RULES_SECOND": "3"},
            overrides=["backend=gloo", "timeout_seconds=-1", "fsdp_cpu_offload=true"],
        )
    assert str(refused.value) == (
        "5 problems in the configuration:\n"
        "  - a.toml: distributed.backend: expected one of 'auto', 'nccl' or 'gloo', found 'mpi'\n"
        "  - a.toml: distributed.fsdp_cpu_offload: expected true or false, found 'no'; write false, without quotes\n"
        "  - environment: PARALLEL_CORE_DDP_STATIC_GRAPH: expected true or false, found 'on'; write true\n"
        "  - override 'timeout_seconds=-1': expected a number > 0 and <= 31_536_000, found '-1'\n"
        "  - a.toml and environment: PARALLEL_CORE_RULES_SECOND: rules: first must be below second (3), found 3"
    )


def test_a_file_that_can_not_be_read_does_not_hide_the_other_problems() -> None:
    Path("a.toml").write_text("backend")
    file, override = problems_of("a.toml", overrides=["backend=mpi"])
    assert file.startswith("a.toml: not valid TOML: ")
    assert override == "override 'backend=mpi': expected one of 'auto', 'nccl' or 'gloo', found 'mpi'"


def test_the_rules_look_at_what_wins(install_strategy: InstallStrategy) -> None:
    install_strategy("rules", settings=RULES)
    Path("a.toml").write_text("rules_first = 3")
    assert load_config("a.toml", environ={}, overrides=["rules_second=4"]) == make(rules_first=3, rules_second=4)
    assert problems_of("a.toml") == ("a.toml: rules: first must be below second (2), found 3",)
    assert problems_of(overrides=["rules_second=1"]) == ("override: rules: first must be below second (1), found 1",)


def test_load_config_does_not_import_torch() -> None:
    Path("a.toml").write_text('backend = "gloo"')
    code = "import sys; from parallel_core import load_config; load_config('a.toml'); print('torch' in sys.modules)"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert run.stdout == "False\n"
