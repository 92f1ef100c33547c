"""What the hooks of a strategy may answer: anything else is named, with the distribution whose bug it is."""

from __future__ import annotations

from typing import NoReturn, TypeVar

from parallel_core.errors import StrategyError

T = TypeVar("T")


class CheckedAnswers:
    """The base of a bound strategy: refuses answers that break the contract.

    Attributes:
        distribution: the name of the strategy's distribution.
    """

    distribution: str

    def _expect(self, kind: type[T], hook: str, answer: object) -> T:
        if not isinstance(answer, kind):
            self._refuse(hook, type(answer).__name__, kind.__name__)
        return answer

    def _expect_list(self, kind: type[T], hook: str, answer: object) -> list[T]:
        found: list[T] = self._expect(list, hook, answer)
        wrong = [type(item).__name__ for item in found if not isinstance(item, kind)]
        if wrong:
            self._refuse(hook, f"a list with {wrong[0]} in it", f"{kind.__name__} alone")
        return found

    def _expect_values(self, kind: type[T], hook: str, answer: object) -> dict[str, T]:
        found: dict[str, T] = self._expect(dict, hook, answer)
        wrong = [name for name, value in found.items() if not isinstance(value, kind)]
        if wrong:
            self._refuse(hook, f"{type(found[wrong[0]]).__name__} for {wrong[0]!r}", kind.__name__)
        return found

    def _refuse(self, hook: str, found: str, expected: str) -> NoReturn:
        raise StrategyError(
            f"strategy {self}: hook {hook} returned {found}, expected {expected}; this is a bug in {self.distribution}"
        )
