"""Settings from any source are checked against the fields of `DistributedConfig`; every problem says its place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from parallel_core.config_sources import ENVIRONMENT_PREFIX, Setting
from parallel_core.conversion import MismatchError, convert, convert_text
from parallel_core.errors import ConfigError, StrategyError
from parallel_core.registry import describe_installed
from parallel_core.strategy import available_strategies, bound_strategy
from parallel_core.strategy_config import CORE_FIELDS, StrategyConfig

__all__ = ["CheckedSettings", "SettingsChecker"]


@dataclass
class CheckedSettings:
    """What settings come to.

    Attributes:
        values: the value of each field that was set rightly, the last one where several sources set it.
        origins: where that value came from.
        problems: everything that is wrong, in the order of the settings; rules across fields last.
        cause: the error of the strategy that was named and can't be used.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    cause: StrategyError | None = None

    def raise_problems(self) -> None:
        """Raise a `ConfigError` that lists all problems, if there are any."""
        if self.problems:
            raise ConfigError(self.problems) from self.cause


@dataclass(frozen=True)
class SettingsChecker:
    """Knows the fields of one `DistributedConfig`.

    Attributes:
        types: the type of each field, by its name.
        strategies: the settings' class of each strategy that the fields come from, by the strategy's name.
    """

    types: Mapping[str, Any]
    strategies: Mapping[str, type[StrategyConfig]]

    def check(self, settings: Iterable[Setting | str]) -> CheckedSettings:
        """Check each setting, and then the rules of each strategy across its fields.

        Args:
            settings: in order of precedence, a later one overrides an earlier one; a string is a problem that was met
                in reading them.
        """
        checked = CheckedSettings()
        doubtful = set()
        for setting in settings:
            if isinstance(setting, str):
                checked.problems.append(setting)
                continue
            try:
                checked.values[setting.name] = self._check_one(setting)
                checked.origins[setting.name] = setting.origin
            except (MismatchError, StrategyError) as error:
                checked.problems.append(f"{setting.place}: {error}")
                checked.cause = checked.cause or (error if isinstance(error, StrategyError) else None)
                doubtful.add(_folded(setting.name).partition("_")[0])
        for strategy in self.strategies:
            # Where a setting is wrong by itself, the rules would only speak about the default in its place.
            if strategy not in doubtful:
                origins = {checked.origins[name]: None for name in checked.values if _is_of(name, strategy)}
                place = f"{' and '.join(origins)}: " if any(origins) else ""
                checked.problems += [f"{place}{problem}" for problem in self.rule_problems(strategy, checked.values)]
        return checked

    def rule_problems(self, strategy: str, values: Mapping[str, Any]) -> list[str]:
        """Return what a strategy's own rules find wrong with these values, each of which is right by itself."""
        try:
            self.options(strategy, values)
        except ConfigError as error:
            return [f"{strategy}: {problem}" for problem in error.problems]
        return []

    def options(self, strategy: str, values: Mapping[str, Any]) -> StrategyConfig:
        """Return the struct of one strategy's settings; those that are not among the values have their defaults."""
        own = {name.partition("_")[2]: value for name, value in values.items() if _is_of(name, strategy)}
        return self.strategies[strategy](**own)

    def _check_one(self, setting: Setting) -> Any:
        if setting.name not in self.types:
            raise self._unknown(setting)
        annotation = self.types[setting.name]
        value = convert(setting.value, annotation) if setting.text is None else convert_text(setting.text, annotation)
        if setting.name == "parallel_strategy":
            bound_strategy(value)
        return value

    def _unknown(self, setting: Setting) -> MismatchError | StrategyError:
        strategy = _folded(setting.name).partition("_")[0]
        for available in available_strategies():
            if available.name == strategy and available.error:
                return available.error
        if isinstance(setting.value, dict) and setting.name in self.strategies:
            names = [f"{setting.name}_{key}" for key in setting.value] or [f"{setting.name}_..."]
            return MismatchError(f"settings are not nested; write {', '.join(names)} in place of the table")
        if setting.table:
            return MismatchError(f"unknown setting; it is a table: table={setting.table!r} reads the settings in it")
        nearest = self._nearest(setting.name)
        hint = f"; did you mean {setting.spell(nearest)!r}?" if nearest else ""
        if strategy in self.strategies:
            own = [repr(setting.spell(name)) for name in self.types if _is_of(name, strategy)]
            allowed = f"allowed are {', '.join(own)}" if own else "it has no settings"
            return MismatchError(f"unknown setting of strategy {strategy!r}; {allowed}{hint}")
        strategies = ", ".join(map(repr, self.strategies))
        # As it was written: `deepspeed.stage` names no strategy.
        has_prefix = strategy and f"{strategy}_" in setting.name.lower()
        if has_prefix and not (nearest or "").endswith(f"_{setting.name}") and nearest not in CORE_FIELDS:
            installed = f"installed are {strategies}" if strategies else describe_installed()
            return MismatchError(f"unknown setting; strategy {strategy!r} is not installed: {installed}{hint}")
        core = ", ".join(repr(setting.spell(name)) for name in CORE_FIELDS)
        others = f" and the settings of {strategies}" if strategies else ""
        return MismatchError(f"unknown setting; allowed are {core}{others}{hint}")

    def _nearest(self, name: str) -> str | None:
        folded = _folded(name)
        # First a right name with a wrong prefix, with none, or with a part of it only: these differ from what is meant
        # by too many letters for a comparison letter by letter.
        named = [f"{strategy}_{rest}" for strategy in self.strategies for rest in (folded, folded.partition("_")[2])]
        ends = [known for known in self.types if "_" in folded and known.endswith(f"_{folded}")]
        candidates = [known for known in named if known in self.types] or ends
        near = difflib.get_close_matches(folded, candidates, n=1, cutoff=0.0) or difflib.get_close_matches(
            folded, self.types, n=1
        )
        return near[0] if near else None


def _folded(name: str) -> str:
    """Return a name as it may have been meant: as in a file, in small letters, with `_` between its parts."""
    return re.sub("[-.]", "_", name.lower()).removeprefix(ENVIRONMENT_PREFIX.lower())


def _is_of(name: str, strategy: str) -> bool:
    return name not in CORE_FIELDS and name.startswith(f"{strategy}_")
