"""The reference says what the code says: hooks, settings, public names."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

import parallel_core
from parallel_core import DistributedConfig, defaults
from parallel_core.binding import specifications
from parallel_core.field_types import describe_type
from parallel_core.hookspecs import REQUIRED_HOOKS
from parallel_core.strategy_config import CORE_FIELDS

if TYPE_CHECKING:
    from tests.docs.conftest import Document

HOOKS = specifications()
# Strategies from elsewhere may be installed; the documentation is about those of this repository.
PLUGINS = tuple(f"{path.name}_" for path in sorted(Path(__file__).parents[2].glob("plugins/*")))
FIELDS = {
    field.name: field
    for field in msgspec.structs.fields(DistributedConfig)
    if field.name in CORE_FIELDS or field.name.startswith(PLUGINS)
}
GENERAL_SECTIONS = {"Hook reference", "Rules for all hooks", "Before the wrap", "The wrap", "State dicts", "The step"}


def signature_of(name: str, function: Callable[..., Any]) -> str:
    return f"`{name}({', '.join(inspect.signature(function).parameters)})`"


def name_in(cell: str) -> str:
    """Return the name that a table's cell is about: `name` or `name(arguments)`."""
    return re.sub(r"\(.*", "", cell).strip("`")


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_has_a_section_with_its_signature_and_whether_it_is_required(
    document_at: Callable[[str], Document], hook: str
) -> None:
    section = document_at("docs/reference/hooks.md").section(hook)
    first_line = section.strip().splitlines()[0]
    assert first_line.startswith(f"{signature_of(hook, HOOKS[hook])} →")
    assert first_line.endswith("**Required.**" if hook in REQUIRED_HOOKS else "**Optional.**")
    assert ("*Default:*" in section) == hasattr(defaults, hook)


def test_the_hook_reference_has_no_section_for_a_hook_that_is_not_there(
    document_at: Callable[[str], Document],
) -> None:
    assert set(document_at("docs/reference/hooks.md").titles) - GENERAL_SECTIONS == set(HOOKS)


def test_the_config_reference_has_every_setting_once(document_at: Callable[[str], Document]) -> None:
    documented = [name_in(row["setting"]) for row in document_at("docs/reference/config.md").rows]
    assert documented == list(FIELDS)


def test_a_table_of_settings_has_their_types_and_defaults(document: Document) -> None:
    for row in document.rows:
        if "setting" in row:
            field = FIELDS[name_in(row["setting"])]
            assert row["default"] == f"`{json.dumps(field.default)}`", field.name
            if "allowed" in row:
                assert row["allowed"] == describe_type(field.type), field.name


@pytest.mark.parametrize("plugin", [name.rstrip("_") for name in PLUGINS])
def test_the_readme_of_a_plugin_has_every_one_of_its_settings(
    document_at: Callable[[str], Document], plugin: str
) -> None:
    documented = [name_in(row["setting"]) for row in document_at(f"plugins/{plugin}/README.md").rows]
    assert documented == [name for name in FIELDS if name.startswith(f"{plugin}_")]


@pytest.mark.parametrize("name", FIELDS)
def test_the_guide_speaks_of_every_setting(document_at: Callable[[str], Document], name: str) -> None:
    assert f"`{name}`" in document_at("docs/guides/distributed.md").prose


@pytest.mark.parametrize("name", parallel_core.__all__)
def test_every_public_name_is_in_the_api_reference(document_at: Callable[[str], Document], name: str) -> None:
    document = document_at("docs/reference/api.md")
    assert re.search(rf"`{name}\b", document.prose)
    public = getattr(parallel_core, name)
    for row in document.rows:
        if "name" in row and name_in(row["name"]) == name and "(" in row["name"]:
            assert row["name"] == signature_of(name, public)


def test_the_api_reference_has_no_name_that_is_not_public(document_at: Callable[[str], Document]) -> None:
    documented = {name_in(row["name"]) for row in document_at("docs/reference/api.md").rows if "name" in row}
    assert documented <= set(parallel_core.__all__)


@pytest.mark.parametrize("module", ["sharding", "sharding_checks", "recomputation", "units", "ranks", "local_shards"])
def test_what_strategies_that_shard_share_is_in_the_api_reference(
    document_at: Callable[[str], Document], module: str
) -> None:
    home = importlib.import_module(f"parallel_core.{module}")
    public = {name: getattr(home, name) for name in home.__all__}
    expected = {signature_of(f"{module}.{name}", value) for name, value in public.items() if inspect.isfunction(value)}
    rows = [row["function"] for row in document_at("docs/reference/api.md").rows if "function" in row]
    assert {row for row in rows if row.startswith(f"`{module}.")} == expected


def test_the_api_reference_has_the_arguments_of_each_function(document_at: Callable[[str], Document]) -> None:
    rows = [row["function"] for row in document_at("docs/reference/api.md").rows if "function" in row]
    for row in (row for row in rows if "(" in row):
        dotted = row.strip("`").partition("(")[0]
        module, _, name = dotted.partition(".")
        assert row == signature_of(dotted, getattr(importlib.import_module(f"parallel_core.{module}"), name))
