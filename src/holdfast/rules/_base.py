"""What a rule is, and how two of them are combined."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any, Self

from holdfast._errors import SettingsError

SUCCESS, FAILURE = "success", "failure"
_OUTCOMES = (SUCCESS, FAILURE)


class Rule:
    """Something that may stop a run; combine two with `|` (either) and `&` (both at once)."""

    def __or__(self, other: object) -> Rule:
        return AnyOf((self, other)) if isinstance(other, Rule) else NotImplemented

    def __and__(self, other: object) -> Rule:
        return AllOf((self, other)) if isinstance(other, Rule) else NotImplemented

    # -- for the judge ------------------------------------------------------------------

    def fresh(self) -> Rule:
        """A copy that has seen nothing: one rule may be given to several runs."""
        raise NotImplementedError

    def leaves(self) -> Iterator[Leaf]:
        """The single rules of which it consists."""
        raise NotImplementedError

    def holding(self) -> list[Leaf]:
        """The single rules for which it stops the run now; none: it does not."""
        raise NotImplementedError


class Leaf(Rule):
    """A single rule, and what it knows."""

    metric = ""  # which it goes by, if it is one
    asks_for_any = False  # whether it looks at the newest values of all metrics
    is_clock = False  # whether it may hold at a boundary where nothing was logged

    def __init__(self, outcome: str) -> None:
        if outcome not in _OUTCOMES:
            raise SettingsError(
                f"{self.kind}(outcome={outcome!r}): there is no such outcome.\n"
                "Valid: 'success' (the training is complete) or 'failure' (it has gone wrong)."
            )
        self.outcome = outcome
        self.reset()

    @property
    def kind(self) -> str:
        return type(self).__name__

    @property
    def key(self) -> str:
        """By which it finds what it knew in the life before, even if its numbers have changed."""
        return f"{self.kind}({self.metric})"

    def fresh(self) -> Rule:
        found = copy.copy(self)  # shallow: what a user's callable refers to is the user's
        found.reset()
        return found

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def holding(self) -> list[Leaf]:
        return [self] if self.holds() else []

    # What each kind has of its own:

    def reset(self) -> None:
        """Forget everything."""

    def sees(self, name: str) -> bool:
        """Whether the values of this metric matter to it."""
        return name == self.metric

    def see(self, name: str, value: float, step: int) -> None:
        """Take in a value that was logged in a step."""

    def tick(self, step: int, world: int) -> None:
        """A boundary: `step` steps are complete."""

    def look(self, latest: Mapping[str, float], step: int) -> None:
        """All values of a step have been seen."""

    def holds(self) -> bool:
        """Whether it wants the run to stop."""
        raise NotImplementedError

    def because(self) -> str:
        """Why, with the numbers."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What the next life is to know: small, and of the same size each time."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


class _CombinedRule(Rule):
    _sign = ""

    def __init__(self, parts: tuple[Rule, ...]) -> None:
        self._parts = parts

    def fresh(self) -> Self:
        return type(self)(tuple(part.fresh() for part in self._parts))

    def leaves(self) -> Iterator[Leaf]:
        for part in self._parts:
            yield from part.leaves()

    def __repr__(self) -> str:
        return f" {self._sign} ".join(
            f"({part!r})" if isinstance(part, _CombinedRule) else repr(part) for part in self._parts
        )


class AnyOf(_CombinedRule):
    """Stops the run when one of its parts does."""

    _sign = "|"

    def holding(self) -> list[Leaf]:
        return [leaf for part in self._parts for leaf in part.holding()]


class AllOf(_CombinedRule):
    """Stops the run when all of its parts would, at one boundary."""

    _sign = "&"

    def holding(self) -> list[Leaf]:
        found = [part.holding() for part in self._parts]
        return [leaf for each in found for leaf in each] if all(found) else []


# -- helpers of the kinds ---------------------------------------------------------------------


def check_metric(kind: str, metric: object) -> str:
    if not isinstance(metric, str) or not metric:
        raise SettingsError(
            f"{kind}({metric!r}): this is no name of a metric.\n"
            f"Name one that run.log() is given, for example {kind}('val_loss', …)."
        )
    return metric


def check_number(what: str, value: object, *, least: float, is_open: bool = False) -> float:
    """A finite number that is large enough."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        found = float(value)
        if found > least or (found == least and not is_open):
            return found
    bound = f", above {least:g}" if is_open else f", {least:g} or more"
    if math.isinf(least):
        bound = ", and a finite one"
    raise SettingsError(f"{what}={value!r}: this is a number{bound}.")


def plain(value: float | None) -> float | str | None:
    """As JSON has it: it knows no infinity."""
    return value if value is None or math.isfinite(value) else str(value)


def from_plain(value: Any) -> float | None:
    return None if value is None else float(value)


def told(value: float) -> str:
    """A number as a person reads it."""
    return f"{value:.6g}"
