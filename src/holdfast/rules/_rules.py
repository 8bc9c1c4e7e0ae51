"""The rules, and how two of them are combined."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, ClassVar, Self

from holdfast._errors import SettingsError
from holdfast._settings import check_count

SUCCESS, FAILURE = "success", "failure"
SAMPLES = "samples"
_STEPS_BEFORE_A_HINT = 10
_MOST_NAMES = 6
_TEXT_LENGTH = 300


class Rule:
    """Something that may stop a run; combine two with `|` (either) and `&` (both at once)."""

    def __or__(self, other: object) -> Rule:
        return _CombinedRule("|", self, other) if isinstance(other, Rule) else NotImplemented

    def __and__(self, other: object) -> Rule:
        return _CombinedRule("&", self, other) if isinstance(other, Rule) else NotImplemented

    # -- for the judge ------------------------------------------------------------------

    def fresh(self) -> Rule:
        """A copy without observations: one rule may be given to several runs."""
        raise NotImplementedError

    def leaves(self) -> Iterator[Leaf]:
        raise NotImplementedError

    def holding(self) -> list[Leaf]:
        """The single rules for which it stops the run now; empty if it does not."""
        raise NotImplementedError


class Leaf(Rule):
    metric = ""  # the one that decides, if there is one
    keeps: ClassVar[dict[str, str]] = {}  # attributes by their names in a checkpoint
    uses_all = False  # True if it uses the newest values of all metrics
    is_clock = False  # True if it may hold at a boundary where nothing was logged
    names_tensors = False  # True if a stop should name the tensors that are not finite

    def __init__(self, outcome: str, about: str, text: str) -> None:
        if outcome not in (SUCCESS, FAILURE):
            raise SettingsError(
                f"{self.kind}(outcome={outcome!r}): there is no such outcome.\n"
                "Valid: 'success' (the training is complete) or 'failure' (it has gone wrong)."
            )
        self.outcome = outcome
        # The name of its state in a checkpoint; its numbers may change between two attempts.
        self.key = f"{self.kind}({about})"
        self._text = f"{self.kind}({text})"
        self.reset()

    @property
    def kind(self) -> str:
        return type(self).__name__

    def __repr__(self) -> str:
        return self._text

    def fresh(self) -> Rule:
        found = copy.copy(self)  # shallow: the objects of a user's callable stay
        found.reset()
        return found

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def holding(self) -> list[Leaf]:
        return [self] if self.holds() else []

    # -- what each kind defines ---------------------------------------------------------

    def reset(self) -> None:
        """Forget everything."""

    def uses(self, name: str) -> bool:
        return name == self.metric

    def observe(self, name: str, value: float, step: int) -> None:
        """A value was logged in this step."""

    def tick(self, step: int, world: int) -> None:
        """A boundary: `step` steps are complete."""

    def evaluate(self, latest: Mapping[str, float], step: int) -> None:
        """All values of a step were observed."""

    def holds(self) -> bool:
        raise NotImplementedError

    def because(self) -> str:
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """What the next attempt needs: small, and of the same size each time."""
        return {name: plain(getattr(self, own)) for name, own in self.keeps.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        for name, own in self.keeps.items():
            value = state[name]
            setattr(self, own, float(value) if isinstance(value, str) else value)


class _CombinedRule(Rule):
    """Stops the run when one of its parts does (`|`), or when all would at one boundary (`&`)."""

    def __init__(self, sign: str, *parts: Rule) -> None:
        self._sign, self._parts = sign, parts

    def fresh(self) -> Self:
        return type(self)(self._sign, *(part.fresh() for part in self._parts))

    def leaves(self) -> Iterator[Leaf]:
        for part in self._parts:
            yield from part.leaves()

    def holding(self) -> list[Leaf]:
        found = [part.holding() for part in self._parts]
        holds = self._sign == "|" or all(found)
        return [leaf for each in found for leaf in each] if holds else []

    def __repr__(self) -> str:
        return f" {self._sign} ".join(
            f"({part!r})" if isinstance(part, _CombinedRule) else repr(part) for part in self._parts
        )


def _check_metric(kind: str, metric: object) -> None:
    if not isinstance(metric, str) or not metric:
        raise SettingsError(
            f"{kind}({metric!r}): this is not the name of a metric.\n"
            f"Name one that run.log() is given, for example {kind}('val_loss', …)."
        )


def _check_number(what: str, value: object, *, least: float, is_open: bool = False) -> float:
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
    """For JSON, which has no infinity."""
    return value if value is None or math.isfinite(value) else str(value)


# -- rules on metrics ---------------------------------------------------------------


_BEST = {"best": "_best", "best_step": "_best_step", "last": "_last"}


class _Streak(Leaf):
    """Counts values in a row, and keeps the best value."""

    patience: int

    def reset(self) -> None:
        self._best: float | None = None
        self._best_step = 0
        self._last: float | None = None
        self._count = 0

    def holds(self) -> bool:
        return self._count >= self.patience


class Plateau(_Streak):
    """A metric has not become better for `patience` values in a row.

    Better is lower (or higher, with mode="max") than the best so far by more than `min_delta`.

    >>> Plateau("val_loss", patience=5, min_delta=0.001)
    Plateau('val_loss', patience=5, min_delta=0.001, mode='min')
    """

    keeps: ClassVar = {**_BEST, "waited": "_count"}

    def __init__(
        self,
        metric: str,
        patience: int,
        min_delta: float = 0.0,
        mode: str = "min",
        outcome: str = SUCCESS,
    ) -> None:
        _check_metric("Plateau", metric)
        check_count(patience, f"Plateau(patience={patience!r})", least=1)
        if mode not in ("min", "max"):
            raise SettingsError(
                f"Plateau(mode={mode!r}): there is no such mode.\n"
                "Valid: 'min' (lower is better) or 'max'."
            )
        self.metric, self.patience, self.mode = metric, patience, mode
        self.min_delta = _check_number("Plateau(min_delta)", min_delta, least=0.0)
        numbers = f"patience={patience}, min_delta={self.min_delta:g}"
        # With the mode: the lowest value is not the highest.
        super().__init__(outcome, f"{metric} {mode}", f"{metric!r}, {numbers}, mode={mode!r}")

    def observe(self, name: str, value: float, step: int) -> None:  # noqa: ARG002  it uses one
        self._last = value
        sign = 1.0 if self.mode == "min" else -1.0
        is_better = math.isfinite(value) and (
            self._best is None or sign * value < sign * self._best - self.min_delta
        )
        if is_better:
            self._best, self._best_step, self._count = value, step, 0
        else:
            self._count += 1

    def because(self) -> str:
        best = "no finite value"
        if self._best is not None:
            best = f"{self._best:.6g} (step {self._best_step})"
        delta = f" by more than {self.min_delta:.6g}" if self.min_delta else ""
        last = "" if self._last is None else f", the last is {self._last:.6g}"
        values = "1 value" if self._count == 1 else f"{self._count} values"
        return f"{self.metric} has not improved{delta} for {values}; the best is {best}{last}"


class Threshold(Leaf):
    """A metric has come above, or below, a value.

    >>> Threshold("accuracy", above=0.95)
    Threshold('accuracy', above=0.95, outcome='success')
    """

    keeps: ClassVar = {"last": "_last"}

    def __init__(
        self,
        metric: str,
        *,
        above: float | None = None,
        below: float | None = None,
        outcome: str = SUCCESS,
    ) -> None:
        _check_metric("Threshold", metric)
        if (above is None) == (below is None):
            raise SettingsError(
                f"Threshold({metric!r}) wants one of above= and below=.\n"
                f"For example: Threshold({metric!r}, above=0.95)"
            )
        self.metric, self._side = metric, "below" if above is None else "above"
        limit = below if above is None else above
        self._limit = _check_number(f"Threshold({self._side})", limit, least=-math.inf)
        text = f"{metric!r}, {self._side}={self._limit:g}, outcome={outcome!r}"
        super().__init__(outcome, f"{metric} {self._side}", text)

    def reset(self) -> None:
        self._last: float | None = None

    def observe(self, name: str, value: float, step: int) -> None:  # noqa: ARG002  it uses one
        self._last = value

    def holds(self) -> bool:
        if self._last is None:
            return False
        return self._last > self._limit if self._side == "above" else self._last < self._limit

    def because(self) -> str:
        return f"{self.metric} is {self._last or 0.0:.6g}, {self._side} {self._limit:.6g}"


class NotFinite(Leaf):
    """A metric is NaN or infinite: of those named, or of all that are logged.

    To include the gradients, log their norm: `run.log(loss=loss, grad_norm=norm)`.

    >>> NotFinite()
    NotFinite()
    """

    names_tensors = True

    def __init__(self, *metrics: str, outcome: str = FAILURE) -> None:
        for metric in metrics:
            _check_metric("NotFinite", metric)
        self._metrics = metrics
        super().__init__(outcome, ", ".join(metrics), ", ".join(map(repr, metrics)))

    def reset(self) -> None:
        self._found: dict[str, tuple[float, int]] = {}  # with the step

    def uses(self, name: str) -> bool:
        return not self._metrics or name in self._metrics

    def observe(self, name: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            self._found[name] = (value, step)
        elif name in self._found and self._found[name][1] != step:
            del self._found[name]  # combined by `&` with something that did not hold then

    def holds(self) -> bool:
        return bool(self._found)

    def because(self) -> str:
        names = [f"{name} is {value}" for name, (value, _) in self._found.items()]
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        return ", ".join(names[:_MOST_NAMES]) + more

    def state(self) -> dict[str, Any]:
        return {name: [str(value), step] for name, (value, step) in self._found.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._found = {name: (float(found[0]), int(found[1])) for name, found in state.items()}


class Diverged(_Streak):
    """A metric has become worse than `factor` times its best value, or is not finite any more.

    With `patience`, so many values in a row.

    >>> Diverged("loss", factor=10)
    Diverged('loss', factor=10, patience=1)
    """

    keeps: ClassVar = {**_BEST, "worse": "_count"}

    def __init__(
        self, metric: str, factor: float, *, patience: int = 1, outcome: str = FAILURE
    ) -> None:
        _check_metric("Diverged", metric)
        self.factor = _check_number("Diverged(factor)", factor, least=1.0, is_open=True)
        check_count(patience, f"Diverged(patience={patience!r})", least=1)
        self.metric, self.patience = metric, patience
        text = f"{metric!r}, factor={self.factor:g}, patience={patience}"
        super().__init__(outcome, metric, text)

    def observe(self, name: str, value: float, step: int) -> None:  # noqa: ARG002  it uses one
        self._last = value
        if not math.isfinite(value):
            self._count += 1
        elif self._best is None or value < self._best:
            self._best, self._best_step, self._count = value, step, 0
        elif self._best and value > self._best + (self.factor - 1) * abs(self._best):
            self._count += 1
        else:
            self._count = 0

    def because(self) -> str:
        last = math.nan if self._last is None else self._last
        if self._best is None:
            return f"{self.metric} is {last:.6g}, and never was finite"
        often = f", {self._count} values in a row" if self.patience > 1 else ""
        worse = f"more than {self.factor:.6g} times its best"
        if not math.isfinite(last):
            worse = "not finite any more; its best was"
        return f"{self.metric} is {last:.6g}, {worse} {self._best:.6g} of step " + (
            f"{self._best_step}{often}"
        )


# -- rules on time, steps and samples ----------------------------------------------------


class Budget(Leaf):
    """The run has used its hours, steps or samples, in all its attempts together.

    Samples are the numbers given to `run.log(samples=…)`: those of this step, on this rank. The
    hours are those in which the run was open.

    >>> Budget(hours=12)
    Budget(hours=12)
    """

    is_clock = True

    def __init__(
        self,
        *,
        hours: float | None = None,
        steps: int | None = None,
        samples: int | None = None,
        outcome: str = SUCCESS,
    ) -> None:
        given = {"hours": hours, "steps": steps, SAMPLES: samples}
        chosen = [name for name, value in given.items() if value is not None]
        if len(chosen) != 1:
            raise SettingsError(
                "Budget() wants one of hours=, steps= and samples=.\n"
                "For several write: Budget(hours=12) | Budget(steps=100_000)"
            )
        self._what = chosen[0]
        limit = given[self._what]
        if self._what == "hours":
            self._limit = _check_number("Budget(hours)", limit, least=0.0, is_open=True)
        else:
            check_count(limit, f"Budget({self._what}={limit!r})", least=1)
            self._limit = float(limit or 0)
        super().__init__(outcome, self._what, f"{self._what}={self._limit:g}")

    @property
    def wants_samples(self) -> bool:
        """Whether it can never hold, because no samples are logged."""
        return self._what == SAMPLES and not self._used and self._ticks >= _STEPS_BEFORE_A_HINT

    def reset(self) -> None:
        self._used = 0.0  # in earlier attempts; samples also in this one
        self._steps = 0
        self._ticks = 0
        self._world = 1
        self._since = time.monotonic()

    def uses(self, name: str) -> bool:
        return name == SAMPLES and self._what == SAMPLES

    def observe(self, name: str, value: float, step: int) -> None:  # noqa: ARG002  it uses one
        # All ranks train on as many samples; other ranks do not send theirs at each step.
        self._used += value * self._world

    def tick(self, step: int, world: int) -> None:
        self._steps, self._world = step, world
        self._ticks += 1

    def _now(self) -> float:
        if self._what == "steps":
            return float(self._steps)
        if self._what == SAMPLES:
            return self._used
        return self._used + (time.monotonic() - self._since) / 3600

    def holds(self) -> bool:
        return self._now() >= self._limit

    def because(self) -> str:
        return f"{self._now():.6g} of {self._limit:.6g} {self._what} are used"

    def state(self) -> dict[str, Any]:
        return {} if self._what == "steps" else {"used": self._now()}

    def load(self, state: Mapping[str, Any]) -> None:
        self._used = float(state.get("used", 0.0))
        self._since = time.monotonic()


class At(Leaf):
    """A moment has come: a datetime, or a text such as "2026-03-01 18:00" (in local time).

    >>> At("2026-03-01 18:00")
    At('2026-03-01 18:00:00')
    """

    is_clock = True

    def __init__(self, moment: datetime | str, *, outcome: str = SUCCESS) -> None:
        found = moment
        if isinstance(moment, str):
            try:
                found = datetime.fromisoformat(moment)
            except ValueError:
                found = ""
        if not isinstance(found, datetime):
            raise SettingsError(
                f"At({moment!r}): this is not a time.\n"
                "Give a datetime, or a text with date and time such as '2026-03-01 18:00'."
            )
        self._moment = found
        self._seconds = found.timestamp()
        super().__init__(outcome, "", repr(str(found)))

    def holds(self) -> bool:
        return time.time() >= self._seconds

    def because(self) -> str:
        return f"it is {self._moment}"


# -- a function of the user ----------------------------------------------------------------


class Seen(Mapping[str, float]):
    """The newest value of each metric, by its name, and the step."""

    def __init__(self, values: Mapping[str, float], step: int) -> None:
        self._values = values
        self.step = step
        self.missed: str | None = None  # a metric that was used, and not logged yet

    def __getitem__(self, name: str) -> float:
        if name not in self._values:
            self.missed = name
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class When(Leaf):
    """A function of the user decides: it returns something true, or a text with the reason.

    It receives the newest value of each metric, at each boundary whose step has logged something.
    While it uses a metric that was not logged yet, the rule does not hold.

    >>> When(lambda seen: seen["loss"] < 0.1 and seen.step > 100)  # doctest: +ELLIPSIS
    When(<lambda>, outcome='success')
    """

    uses_all = True

    def __init__(self, check: Callable[[Seen], object], *, outcome: str = SUCCESS) -> None:
        if not callable(check):
            raise SettingsError(
                f"When({check!r}): this cannot be called.\n"
                "Give a function of the metrics: When(lambda seen: seen['loss'] < 0.1)"
            )
        self._check = check
        self._name = str(getattr(check, "__name__", type(check).__name__))
        super().__init__(outcome, self._name, f"{self._name}, outcome={outcome!r}")

    def reset(self) -> None:
        self._said = ""
        self._holds = False

    def uses(self, name: str) -> bool:  # noqa: ARG002  it may use any
        return True

    def evaluate(self, latest: Mapping[str, float], step: int) -> None:
        seen = Seen(latest, step)
        try:
            found = self._check(seen)
        except KeyError:
            if seen.missed is None:
                raise  # a mistake in the function
            found = False
        self._holds = bool(found)
        if isinstance(found, str):
            self._said = found[:_TEXT_LENGTH]
        elif self._holds:
            values = [f"{name} {value:.6g}" for name, value in latest.items()]
            self._said = f"{self._name} says so ({', '.join(values[:_MOST_NAMES])})"

    def holds(self) -> bool:
        return self._holds

    def because(self) -> str:
        return self._said

    def state(self) -> dict[str, Any]:
        return {"holds": self._holds, "said": self._said}

    def load(self, state: Mapping[str, Any]) -> None:
        self._holds, self._said = bool(state["holds"]), str(state["said"])
