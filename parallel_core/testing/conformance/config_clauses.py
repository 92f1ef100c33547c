"""Clauses on the settings."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import msgspec
import pytest

from parallel_core import ConfigError, DistributedConfig, available_strategies
from parallel_core.registry import find_registration
from parallel_core.strategy import bound_strategy
from parallel_core.testing.conformance.declaration import Declaration


class ConfigClauses(Declaration):
    """How the strategy is found and its settings are checked."""

    def test_is_registered(self) -> None:
        """The strategy is found by its name, in one distribution, and keeps the contract of the hooks."""
        found = {entry.name: entry.error for entry in available_strategies()}
        assert self.strategy in found, f"no strategy {self.strategy!r} is installed: there are {', '.join(found)}"
        assert found[self.strategy] is None

    def test_settings_have_defaults(self) -> None:
        """The strategy's name alone is a valid config, which can be hashed, compared and pickled."""
        config = DistributedConfig(parallel_strategy=self.strategy)
        assert isinstance(config.options, bound_strategy(self.strategy).config_class)
        copy = pickle.loads(pickle.dumps(config))  # noqa: S301  # what was pickled one line ago
        assert copy == config
        assert hash(copy) == hash(config)

    def test_unknown_settings_are_refused(self) -> None:
        """A setting with the strategy's prefix that it does not have is an error that names it."""
        with pytest.raises(ConfigError, match=f"{self.strategy}_no_such_setting"):
            DistributedConfig(**{f"{self.strategy}_no_such_setting": 1})

    def test_wrong_values_are_refused(self) -> None:
        """A value of the wrong type is an error that names the setting, for every setting."""
        for field in msgspec.structs.fields(bound_strategy(self.strategy).config_class):
            name = f"{self.strategy}_{field.name}"
            with pytest.raises(ConfigError, match=name):
                DistributedConfig(**{name: object()})

    def test_loads_without_torch(self) -> None:
        """The strategy's module imports without torch: settings are checked on machines and in moments without it."""
        entry_point = find_registration(self.strategy).entry_point
        module = importlib.import_module(entry_point.module)
        assert module.__file__ is not None
        program = (
            f"import sys; sys.path[:] = {sys.path!r}\n"
            f"import parallel_core, {entry_point.module}\n"
            f"parallel_core.DistributedConfig(parallel_strategy={self.strategy!r})\n"
            f"print('torch' in sys.modules)"
        )
        answer = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
        )
        assert answer.stdout.strip() == "False", answer.stdout + answer.stderr
