"""The judge: reads logged values, passes them to the rules, and decides when to stop."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from holdfast._adapters.metrics import is_on_host
from holdfast._errors import SettingsError
from holdfast._text import unique_names
from holdfast.rules._rules import FAILURE, SUCCESS, Budget, Leaf, Rule, plain

_MOST_WAITING = 256  # steps whose values have not arrived from a device


@dataclass(frozen=True)
class RuleVerdict:
    outcome: str
    reason: str
    step: int  # in which the values were logged
    rules: tuple[dict[str, Any], ...] = field(default=())  # each that holds, with its state
    names_tensors: bool = False
    rank: int | None = None  # if another rank has reported it

    @property
    def is_bad(self) -> bool:
        return self.outcome == FAILURE


class Judge:
    def __init__(self, rule: Rule | None, world: int = 1) -> None:
        self._rule = None if rule is None else rule.fresh()
        self._world = world
        self._leaves: list[Leaf] = [] if self._rule is None else list(self._rule.leaves())
        # A name that is the same in every attempt.
        self._keys = unique_names(((leaf.key, leaf) for leaf in self._leaves), " #")
        self._has_clocks = any(leaf.is_clock for leaf in self._leaves)
        self._keeps_latest = any(leaf.uses_all for leaf in self._leaves)
        self._users: dict[str, list[Leaf]] = {}  # of each metric
        self.is_there = rule is not None  # read at each boundary: a property would cost time
        self.names_tensors = any(leaf.names_tensors for leaf in self._leaves)
        self._logged: list[tuple[str, float | Reading]] = []  # since the last boundary
        self._waiting: deque[tuple[int, list[tuple[str, float | Reading]]]] = deque()
        self._latest: dict[str, float] = {}
        self._has_asked_for_samples = False
        self.verdict: RuleVerdict | None = None

    def note(self, name: str, held: Any) -> None:
        """A metric was logged; this does not wait for a value on a device."""
        if self._users_of(name):
            # A plain number, at each step: no call for it.
            reading = held if type(held) is float else begin_reading(held, for_rule=True)
            self._logged.append((name, reading))

    def look(self, step: int) -> bool:
        """At a boundary: whether a rule stops the run, by the values that have arrived."""
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

    def wait_for_values(self) -> bool:
        """The same before a snapshot: waits for the values of all complete steps."""
        while self._waiting and self.verdict is None:
            self._take_in(*self._waiting.popleft())
        return self.verdict is not None

    def lacks_samples(self) -> bool:
        """Whether a budget of samples can never be used up; true only once."""
        if self._has_asked_for_samples:
            return False
        lacks = any(isinstance(leaf, Budget) and leaf.wants_samples for leaf in self._leaves)
        self._has_asked_for_samples = lacks
        return lacks

    def state(self) -> dict[str, Any]:
        if self._rule is None:
            return {}
        states = {key: leaf.state() for key, leaf in self._keys.items()}
        found: dict[str, Any] = {"leaves": {key: state for key, state in states.items() if state}}
        if self._keeps_latest:
            found["latest"] = {name: plain(value) for name, value in self._latest.items()}
        return found

    def load(self, state: Mapping[str, Any] | None) -> None:
        """Restore that; a new rule begins without observations."""
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
        """Whether the rules of this attempt would stop the run by their stored state."""
        for leaf in self._leaves:
            leaf.tick(step, self._world)
            leaf.evaluate(self._latest, step)  # the function may have changed
        return self._rule is not None and bool(self._rule.holding())

    # -- inside -----------------------------------------------------------------------

    def _users_of(self, name: str) -> list[Leaf]:
        found = self._users.get(name)
        if found is None:
            found = self._users[name] = [leaf for leaf in self._leaves if leaf.uses(name)]
        return found

    def _take_in(self, step: int, logged: list[tuple[str, float | Reading]]) -> None:
        for name, reading in logged:
            value = reading if isinstance(reading, float) else reading.value()
            self._latest[name] = value
            for leaf in self._users_of(name):
                leaf.observe(name, value, step)
        if self._keeps_latest:
            for leaf in self._leaves:
                leaf.evaluate(self._latest, step)
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
            any(leaf.names_tensors for leaf in bad),
        )


def _is_ready(logged: list[tuple[str, float | Reading]]) -> bool:
    for _, reading in logged:  # at each step: a generator would cost time
        if not isinstance(reading, float) and not reading.is_ready():
            return False
    return True


def checked_rule(given: object) -> Rule | None:
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


# -- A logged value, read without waiting for a device --------------------------------------
# A value in the memory of this machine is read at once: a tensor may change in place later. From a
# GPU a copy begins when the value is logged, in the order of the device's own work, and is read
# when it has arrived. Arrays of JAX and tensors of TensorFlow never change. A rule then holds a few
# steps later. No snapshot is taken of a step whose values were not read.


class Reading(Protocol):
    """A number that is being read."""

    def is_ready(self) -> bool: ...
    def value(self) -> float:
        """Waits for it."""
        ...


class _Later:
    """A value that is read when it is needed; only arrays of JAX report that they are ready."""

    __slots__ = ("_held",)

    def __init__(self, held: Any) -> None:
        self._held = held

    def is_ready(self) -> bool:
        ask = getattr(self._held, "is_ready", None)
        return ask is not None and bool(ask())

    def value(self) -> float:
        return float(self._held)


class _ByThread:
    """A value that does not report that it is ready: a thread waits for it.

    While it waits for a device it does not hold the interpreter.
    """

    def __init__(self, held: Any) -> None:
        self._found = float("nan")
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._read, args=(held,), name="holdfast-metric", daemon=True
        )
        self._thread.start()

    def _read(self, held: Any) -> None:
        try:
            self._found = float(held)
        except Exception as error:  # noqa: BLE001  raised where the value is used
            self._error = error

    def is_ready(self) -> bool:
        return not self._thread.is_alive()

    def value(self) -> float:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found


def begin_reading(held: Any, *, for_rule: bool) -> float | Reading:
    """Begin to read a value as `Metrics` holds it.

    A rule must hold at the step itself where that is possible. So it waits for what JAX computes on
    the CPU, and a thread waits for a value that does not report that it is ready.
    """
    if isinstance(held, int | float):  # also of NumPy
        return float(held)
    reports, is_here = hasattr(held, "is_ready"), is_on_host(held)
    if is_here and (for_rule or not reports):
        return float(held)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(held, torch.Tensor) and held.is_cuda:
        from holdfast.torch.readings import OnItsWay

        return OnItsWay(held)
    if reports and not is_here:
        held.copy_to_host_async()
    return _Later(held) if reports or not for_rule else _ByThread(held)
