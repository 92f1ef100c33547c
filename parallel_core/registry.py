"""Which strategies are installed: entry points read from metadata, nothing imported until a name is used."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import re
from dataclasses import dataclass, field

from parallel_core.errors import StrategyError, did_you_mean
from parallel_core.hookspecs import ENTRY_POINT_GROUP

logger = logging.getLogger(__name__)

STRATEGY_NAME = re.compile(r"[a-z][a-z0-9]*")


@dataclass(frozen=True)
class Registration:
    """One distribution's claim to one strategy name."""

    name: str
    distribution: str
    version: str
    entry_point: importlib.metadata.EntryPoint = field(repr=False)

    def __str__(self) -> str:
        return f"{self.name!r} ({self.distribution} {self.version})"


@functools.cache
def registrations() -> dict[str, tuple[Registration, ...]]:
    """Return every claim to every strategy name, by name; more than one claim to a name is a conflict.

    The answer is kept for the life of the process; `registrations.cache_clear()` makes it look again.
    """
    claims: dict[str, list[Registration]] = {}
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            found = _claims_of(distribution)
        except Exception as error:  # a damaged file, or none: whatever reading it raises
            where = getattr(distribution, "_path", distribution)
            logger.warning("%s: its entry points can't be read (%s), so it registers nothing", where, error)
            continue
        # One distribution can stand on sys.path twice (lib64 linked to lib, an egg-info beside a dist-info). The first
        # one is the one that an import takes.
        identities = {re.sub(r"[-_.]+", "-", claim.distribution).lower() for claim in found}
        if not identities & seen:
            seen |= identities
            for claim in found:
                claims.setdefault(claim.name, []).append(claim)
    return {name: tuple(claims[name]) for name in sorted(claims)}


def _claims_of(distribution: importlib.metadata.Distribution) -> list[Registration]:
    # Most distributions register nothing here: their text is looked at, never parsed, so that a file which can't be
    # parsed breaks nobody who has nothing to do with it.
    if f"[{ENTRY_POINT_GROUP}]" not in (distribution.read_text("entry_points.txt") or ""):
        return []
    name = distribution.metadata["Name"]
    if not name:
        raise ValueError("its metadata gives no name; an uninstall may have been interrupted")
    version = distribution.version or "of unknown version"
    entry_points = distribution.entry_points.select(group=ENTRY_POINT_GROUP)
    return [Registration(entry_point.name, name, version, entry_point) for entry_point in entry_points]


def find_registration(name: str) -> Registration:
    """Return the one claim to a strategy name.

    Raises:
        StrategyError: nobody claims the name, several distributions do, or one does more than once; or it is no valid
            strategy name.
    """
    claims = registrations().get(name, ())
    if not claims:
        hint = (
            did_you_mean(name, registrations()) or f"; a strategy is an entry point of the group {ENTRY_POINT_GROUP!r}"
        )
        raise StrategyError(f"unknown strategy {name!r}: {describe_installed()}{hint}")
    if len(claims) > 1:
        claimants = list(dict.fromkeys(f"{claim.distribution} {claim.version}" for claim in claims))
        if len(claimants) == 1:
            targets = " and ".join(repr(claim.entry_point.value) for claim in claims)
            raise StrategyError(
                f"strategy {name!r} is claimed more than once by {claimants[0]}, for {targets}; repair or uninstall "
                f"{claims[0].distribution}"
            )
        raise StrategyError(f"strategy {name!r} is claimed by {' and '.join(claimants)}; uninstall all of them but one")
    if not STRATEGY_NAME.fullmatch(name):
        raise StrategyError(
            f"{claims[0]} can't be the name of a strategy: allowed are lower-case letters and digits, a letter first; "
            f"rename the entry point in {claims[0].distribution}"
        )
    return claims[0]


def describe_installed() -> str:
    """Return the installed strategies in words, for an error about a name that is not among them.

    Those that can't be used are named with their reasons: the one that the user looks for may be among them.
    """
    usable: list[str] = []
    failed: list[str] = []
    for name, claims in registrations().items():
        try:
            load_plugin(find_registration(name))
        except StrategyError as error:
            failed.append(str(error))
        else:
            usable.append(str(claims[0]))
    installed = f"installed are {', '.join(usable)}" if usable else "no strategy is installed"
    if not registrations():
        installed += "; `pip install parallel-core[all]` brings all of this project"
    return "; ".join([installed, *failed])


def load_plugin(registration: Registration) -> object:
    """Import what an entry point names: the strategy's module or object.

    Raises:
        StrategyError: the import fails; the cause is chained.
    """
    if registration.entry_point.pattern.match(registration.entry_point.value) is None:
        raise StrategyError(
            f"strategy {registration}: its entry point is {registration.entry_point.value!r}, expected 'module' or "
            f"'module:object'; repair or uninstall {registration.distribution}"
        )
    try:
        return registration.entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and what a test's helper raises to skip
        raise StrategyError(
            f"strategy {registration} failed to load from {registration.entry_point.value!r}: "
            f"{type(error).__name__}: {error}; repair or uninstall {registration.distribution}"
        ) from error
