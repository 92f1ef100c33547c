"""`DistributedConfig`, all that a config file may say, and `load_config`, which reads one.

`DistributedConfig` has the core's fields and those of every installed strategy, prefixed with the strategy's name. The
class is composed when it is first asked for, and anew when other strategies are installed.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

import msgspec

from parallel_core.config_check import CheckedSettings, SettingsChecker
from parallel_core.config_sources import Setting, read_environment, read_file, read_overrides
from parallel_core.errors import ConfigError, StrategyError
from parallel_core.strategy import available_strategies, bound_strategy
from parallel_core.strategy_config import CORE_FIELDS, StrategyConfig, ValidatedStruct, field_types_of

__all__ = ["DistributedConfig", "DistributedConfigBase", "SettingOrigin", "load_config", "trace_config"]

DEFAULT_STRATEGY = "ddp"
_YEAR = 31_536_000


class DistributedConfigBase(ValidatedStruct):
    """What every `DistributedConfig` has, whichever strategies are installed; for `isinstance`, not for making one.

    Attributes:
        parallel_strategy: the name of the strategy to train with.
        backend: how ranks talk to each other. `auto` is NCCL where the ranks have GPUs and gloo elsewhere; `gloo` means
            the CPU.
        timeout_seconds: how long a rank waits for the others before it fails, at most a year. A rank that has died
            holds up the others for as long. torch waits 600 s under NCCL and 1800 s under gloo; this is 600 s for both.
            Raise it where one rank works alone for longer, say to prepare data.
    """

    parallel_strategy: str = DEFAULT_STRATEGY
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0, le=_YEAR)] = 600.0

    _checker: ClassVar[SettingsChecker]

    @property
    def options(self) -> StrategyConfig:
        """The settings of the strategy that is named.

        Raises:
            StrategyError: that strategy is not installed; only the default one can be so late to be missed.
        """
        return self.options_for(self.parallel_strategy)

    def options_for(self, strategy: str) -> StrategyConfig:
        """Return the settings of any installed strategy.

        Raises:
            StrategyError: the strategy is not installed, or can't be used.
        """
        if strategy not in self._checker.strategies:
            raise StrategyError(f"this config was made without strategy {bound_strategy(strategy)}; make it again")
        return self._checker.options(strategy, msgspec.structs.asdict(self))

    def problems(self) -> Iterable[str]:
        """Return what each strategy's own rules find wrong, whether it is the one named or not."""
        values = msgspec.structs.asdict(self)
        problems = [line for name in self._checker.strategies for line in self._checker.rule_problems(name, values)]
        # The default may name a strategy that is not installed: that is an error when a model is to be wrapped, for
        # else nothing could be configured where only other strategies are installed.
        if self.parallel_strategy != DEFAULT_STRATEGY:
            try:
                bound_strategy(self.parallel_strategy)
            except StrategyError as error:
                raise ConfigError([f"parallel_strategy: {error}", *problems]) from error
        return problems

    @classmethod
    def _check_given(cls, given: dict[str, object]) -> None:
        cls._checker.check(Setting(name, place=name, value=value) for name, value in given.items()).raise_problems()

    def __repr__(self) -> str:
        return f"DistributedConfig({', '.join(f'{name}={value!r}' for name, value in self._telling().items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process composes the class anew, perhaps without a strategy that plays no part here.
        return _restore, (self._telling(),)

    def _telling(self) -> dict[str, Any]:
        """The core's settings, those of the strategy that is named, and what else differs from its default."""
        values, default = msgspec.structs.asdict(self), type(self)()
        always = (*CORE_FIELDS, *(name for name in values if name.startswith(f"{self.parallel_strategy}_")))
        return {name: value for name, value in values.items() if name in always or value != getattr(default, name)}


if TYPE_CHECKING:

    class DistributedConfig(DistributedConfigBase):
        """The fields are those of the installed strategies, which only the running program knows."""

        def __init__(self, **fields: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

else:

    def __getattr__(name: str) -> Any:
        if name == "DistributedConfig":
            return _composed_class()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _composed_class() -> type[DistributedConfig]:
    usable = {found.name: None for found in available_strategies() if found.error is None}
    return _compose(tuple((name, bound_strategy(name).config_class) for name in usable))


@functools.cache
def _compose(strategies: tuple[tuple[str, type[StrategyConfig]], ...]) -> type[DistributedConfig]:
    annotations: dict[str, Any] = {}
    namespace: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": DistributedConfigBase.__doc__,
        "__annotations__": annotations,
    }
    for strategy, config_class in strategies:
        for field in msgspec.structs.fields(config_class):
            annotations[f"{strategy}_{field.name}"] = field.type
            # One of the two is NODEFAULT, which msgspec.field takes for not given.
            default: Any = {"default": field.default, "default_factory": field.default_factory}
            namespace[f"{strategy}_{field.name}"] = msgspec.field(**default)
    bases = (DistributedConfigBase,)
    composed: Any = types.new_class("DistributedConfig", bases, exec_body=lambda body: body.update(namespace))
    composed._checker = SettingsChecker(field_types_of(composed), dict(strategies))
    return cast("type[DistributedConfig]", composed)


def _restore(settings: dict[str, Any]) -> DistributedConfig:
    # The default strategy may be missing, as long as nobody names it.
    named = {
        name: value for name, value in settings.items() if (name, value) != ("parallel_strategy", DEFAULT_STRATEGY)
    }
    return _composed_class()(**named)


def load_config(
    path: str | os.PathLike[str] | None = None,
    table: str | None = None,
    *,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> DistributedConfig:
    """Return the configuration that a file, the environment and overrides make, in this order of precedence.

    Overrides win over the environment, which wins over the file. In the last two a value is a text: it is read as a
    TOML value (`true`, `10_000_000`, `["a", "b"]`), and as a plain string where that does not fit; `null` is None
    where a setting may be None. A value that is overridden is checked nevertheless.

    Args:
        path: a file in TOML, YAML 1.2 or JSON, as its suffix says; None for no file.
        table: the table of the file that holds the settings, `distributed` or `training.distributed`; None for the top.
        overrides: strings such as `fsdp_cpu_offload=true`; of two for one setting the later wins.
        environ: the variables to look for `PARALLEL_CORE_FSDP_CPU_OFFLOAD` and the like in; None for `os.environ`.

    Raises:
        ConfigError: something is wrong with any of them; it lists all problems, each with its place.
    """
    checked = _check_sources(path, table, overrides, environ)
    return _composed_class()(**checked.values)


@dataclass(frozen=True)
class SettingOrigin:
    """A setting, its value and where that came from: `default`, the file, the environment variable or `override`."""

    name: str
    value: Any
    origin: str


def trace_config(
    path: str | os.PathLike[str] | None = None,
    table: str | None = None,
    *,
    overrides: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> list[SettingOrigin]:
    """Return every setting of what `load_config` makes of the same arguments, with its origin.

    Raises:
        ConfigError: as `load_config` does.
    """
    checked = _check_sources(path, table, overrides, environ)
    values = msgspec.structs.asdict(_composed_class()(**checked.values))
    return [SettingOrigin(name, value, checked.origins.get(name, "default")) for name, value in values.items()]


def _check_sources(
    path: str | os.PathLike[str] | None,
    table: str | None,
    overrides: Iterable[str],
    environ: Mapping[str, str] | None,
) -> CheckedSettings:
    found: list[Setting | str] = []
    if path is not None:
        found += read_file(path, table)
    elif table is not None:
        found.append(f"table={table!r}: expected a file to look for it in, found path=None")
    found += read_environment(os.environ if environ is None else environ)
    found += read_overrides(overrides)
    checked = _composed_class()._checker.check(found)
    checked.raise_problems()
    return checked
