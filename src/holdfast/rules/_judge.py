"""The judge: gives the rules what was logged, in its order, and says when they stop the run."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast._errors import SettingsError
from holdfast.rules._base import FAILURE, SUCCESS, Leaf, Rule, plain
from holdfast.rules._clocks import Budget
from holdfast.rules._reading import Reading, begin_reading

_MOST_WAITING = 256  # steps whose values are on their way from a device


@dataclass(frozen=True)
class RuleVerdict:
    """Why a rule stops the run."""

    outcome: str
    reason: str
    step: int  # in which the values were logged
    rules: tuple[dict[str, Any], ...] = field(default=())  # each that holds, with what it knows
    names_tensors: bool = False
    rank: int | None = None  # if another one has told it

    @property
    def is_bad(self) -> bool:
        return self.outcome == FAILURE


class Judge:
    """The rules of one life of a run."""

    def __init__(self, rule: Rule | None, world: int = 1) -> None:
        self._rule = None if rule is None else rule.fresh()
        self._world = world
        self._leaves: list[Leaf] = [] if self._rule is None else list(self._rule.leaves())
        self._keys = _named(self._leaves)
        self._has_clocks = any(leaf.is_clock for leaf in self._leaves)
        self._keeps_latest = any(leaf.asks_for_any for leaf in self._leaves)
        self._seeing: dict[str, list[Leaf]] = {}  # by metric: those to which it matters
        self.is_there = rule is not None  # asked at each boundary: no property
        self.names_tensors = any(getattr(leaf, "names_tensors", False) for leaf in self._leaves)
        self._logged: list[tuple[str, Reading]] = []  # since the last boundary
        self._waiting: deque[tuple[int, list[tuple[str, Reading]]]] = deque()
        self._latest: dict[str, float] = {}
        self._has_asked_for_samples = False
        self.verdict: RuleVerdict | None = None

    def note(self, name: str, held: Any) -> None:
        """A metric was logged; a value on a device is not waited for."""
        if self._who_sees(name):
            self._logged.append((name, begin_reading(held)))

    def look(self, step: int) -> bool:
        """At a boundary: whether a rule stops the run, as far as values have arrived."""
        if self._rule is None or self.verdict is not None:
            return self.verdict is not None
        if self._logged:
            self._waiting.append((step, self._logged))
            self._logged = []
        while self._waiting and self.verdict is None:
            if len(self._waiting) <= _MOST_WAITING and not _is_ready(self._waiting[0][1]):
                break
            self._take_in(*self._waiting.popleft())
        if self._has_clocks and self.verdict is None:
            for leaf in self._leaves:
                leaf.tick(step, self._world)
            self._decide(step)
        return self.verdict is not None

    def settle(self) -> bool:
        """The same, waiting for the values of all steps that are complete: before a snapshot."""
        while self._waiting and self.verdict is None:
            self._take_in(*self._waiting.popleft())
        return self.verdict is not None

    def lacks_samples(self) -> bool:
        """Whether a budget of samples is waiting in vain; said once."""
        if self._has_asked_for_samples:
            return False
        lacks = any(isinstance(leaf, Budget) and leaf.wants_samples for leaf in self._leaves)
        self._has_asked_for_samples = lacks
        return lacks

    def state(self) -> dict[str, Any]:
        """What the next life is to know."""
        if self._rule is None:
            return {}
        states = {key: leaf.state() for key, leaf in self._keys.items()}
        found: dict[str, Any] = {"leaves": {key: state for key, state in states.items() if state}}
        if self._keeps_latest:
            found["latest"] = {name: plain(value) for name, value in self._latest.items()}
        return found

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Go on from there; a rule that is new begins with nothing."""
        self._logged.clear()
        self._waiting.clear()
        latest = (state or {}).get("latest", {})
        self._latest = {name: float(value) for name, value in latest.items()}
        self.verdict = None
        known = (state or {}).get("leaves", {})
        for key, leaf in self._keys.items():
            leaf.reset()
            if key in known:
                leaf.load(known[key])

    def holds(self, step: int) -> bool:
        """Whether the rules, as they are now and by what they know, would stop the run."""
        for leaf in self._leaves:
            leaf.tick(step, self._world)
            leaf.look(self._latest, step)  # a function may be another by now
        return self._rule is not None and bool(self._rule.holding())

    # -- inside -----------------------------------------------------------------------

    def _who_sees(self, name: str) -> list[Leaf]:
        found = self._seeing.get(name)
        if found is None:
            found = self._seeing[name] = [leaf for leaf in self._leaves if leaf.sees(name)]
        return found

    def _take_in(self, step: int, logged: list[tuple[str, Reading]]) -> None:
        for name, reading in logged:
            value = reading.value()
            self._latest[name] = value
            for leaf in self._who_sees(name):
                leaf.see(name, value, step)
        if self._keeps_latest:
            for leaf in self._leaves:
                leaf.look(self._latest, step)
        self._decide(step)

    def _decide(self, step: int) -> None:
        assert self._rule is not None
        holding = self._rule.holding()
        if not holding:
            return
        bad = [leaf for leaf in holding if leaf.outcome == FAILURE]
        reason = "; ".join(f"{leaf.kind}: {leaf.because()}" for leaf in holding)
        if bad:
            reason = f"{reason} (step {step})"
        self.verdict = RuleVerdict(
            FAILURE if bad else SUCCESS,
            reason,
            step,
            tuple({"rule": repr(leaf), "knows": leaf.state()} for leaf in holding),
            any(getattr(leaf, "names_tensors", False) for leaf in bad),
        )


def _is_ready(logged: list[tuple[str, Reading]]) -> bool:
    for _, reading in logged:  # noqa: SIM110  at each step: a generator takes as long as the rest
        if not reading.is_ready():
            return False
    return True


def _named(leaves: list[Leaf]) -> dict[str, Leaf]:
    """Each under a name that it has in every life."""
    found: dict[str, Leaf] = {}
    for leaf in leaves:
        key, number = leaf.key, 1
        while key in found:
            number += 1
            key = f"{leaf.key} #{number}"
        found[key] = leaf
    return found


def checked_rule(given: object) -> Rule | None:
    """What a run was given as `stop_when`."""
    if given is None or isinstance(given, Rule):
        return given
    if isinstance(given, type) and issubclass(given, Rule):
        raise SettingsError(
            f"stop_when={given.__name__} is a class.\nMake a rule of it: {given.__name__}(…)"
        )
    kind = type(given).__name__
    raise SettingsError(
        f"stop_when={given!r} is a {kind}.\n"
        "Valid: a rule of holdfast.rules, or several combined with | and &, for example "
        "Plateau('val_loss', patience=5) | NotFinite()."
    )
