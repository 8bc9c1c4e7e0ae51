"""Rules that go by the values of a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from holdfast._errors import SettingsError
from holdfast._settings import check_count
from holdfast.rules._base import (
    FAILURE,
    SUCCESS,
    Leaf,
    check_metric,
    check_number,
    from_plain,
    plain,
    told,
)

_MOST_NAMES = 6


class Plateau(Leaf):
    """A metric has not become better for `patience` values in a row.

    Better is lower (or higher, with mode="max") than the best so far by more than `min_delta`.

    >>> Plateau("val_loss", patience=5, min_delta=0.001)
    Plateau('val_loss', patience=5, min_delta=0.001, mode='min')
    """

    def __init__(
        self,
        metric: str,
        patience: int,
        min_delta: float = 0.0,
        mode: str = "min",
        outcome: str = SUCCESS,
    ) -> None:
        self.metric = check_metric("Plateau", metric)
        check_count(patience, f"Plateau(patience={patience!r})", least=1)
        if mode not in ("min", "max"):
            raise SettingsError(
                f"Plateau(mode={mode!r}): there is no such mode.\n"
                "Valid: 'min' (lower is better) or 'max'."
            )
        self.patience = patience
        self.min_delta = check_number("Plateau(min_delta)", min_delta, least=0.0)
        self.mode = mode
        super().__init__(outcome)

    def __repr__(self) -> str:
        return (
            f"Plateau({self.metric!r}, patience={self.patience}, min_delta={self.min_delta:g}, "
            f"mode={self.mode!r})"
        )

    @property
    def key(self) -> str:
        return f"{self.kind}({self.metric} {self.mode})"  # the lowest value is not the highest

    def reset(self) -> None:
        self._best: float | None = None
        self._best_step = 0
        self._last: float | None = None
        self._waited = 0  # values since the best one

    def see(self, name: str, value: float, step: int) -> None:  # noqa: ARG002  its only one
        self._last = value
        sign = 1.0 if self.mode == "min" else -1.0
        is_better = math.isfinite(value) and (
            self._best is None or sign * value < sign * self._best - self.min_delta
        )
        if is_better:
            self._best, self._best_step, self._waited = value, step, 0
        else:
            self._waited += 1

    def holds(self) -> bool:
        return self._waited >= self.patience

    def because(self) -> str:
        best = "no finite value"
        if self._best is not None:
            best = f"{told(self._best)} (step {self._best_step})"
        delta = f" by more than {told(self.min_delta)}" if self.min_delta else ""
        last = "" if self._last is None else f", the last is {told(self._last)}"
        values = "1 value" if self._waited == 1 else f"{self._waited} values"
        return f"{self.metric} has not improved{delta} for {values}; the best is {best}{last}"

    def state(self) -> dict[str, Any]:
        return {
            "best": plain(self._best),
            "best_step": self._best_step,
            "last": plain(self._last),
            "waited": self._waited,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._best, self._last = from_plain(state["best"]), from_plain(state["last"])
        self._best_step, self._waited = int(state["best_step"]), int(state["waited"])


class Threshold(Leaf):
    """A metric has come above, or below, a value.

    >>> Threshold("accuracy", above=0.95)
    Threshold('accuracy', above=0.95, outcome='success')
    """

    def __init__(
        self,
        metric: str,
        *,
        above: float | None = None,
        below: float | None = None,
        outcome: str = SUCCESS,
    ) -> None:
        self.metric = check_metric("Threshold", metric)
        if (above is None) == (below is None):
            raise SettingsError(
                f"Threshold({metric!r}) wants one of above= and below=.\n"
                f"For example: Threshold({metric!r}, above=0.95)"
            )
        limit = above if above is not None else below
        name = "above" if above is not None else "below"
        self._limit = check_number(f"Threshold({name})", limit, least=-math.inf)
        self._is_above = above is not None
        super().__init__(outcome)

    def __repr__(self) -> str:
        side = "above" if self._is_above else "below"
        return f"Threshold({self.metric!r}, {side}={self._limit:g}, outcome={self.outcome!r})"

    @property
    def key(self) -> str:
        return f"{self.kind}({self.metric} {'above' if self._is_above else 'below'})"

    def reset(self) -> None:
        self._last: float | None = None

    def see(self, name: str, value: float, step: int) -> None:  # noqa: ARG002  its only one
        self._last = value

    def holds(self) -> bool:
        if self._last is None:
            return False
        return self._last > self._limit if self._is_above else self._last < self._limit

    def because(self) -> str:
        side = "above" if self._is_above else "below"
        return f"{self.metric} is {told(self._last or 0.0)}, {side} {told(self._limit)}"

    def state(self) -> dict[str, Any]:
        return {"last": plain(self._last)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._last = from_plain(state["last"])


class NotFinite(Leaf):
    """A metric is NaN or infinite: of those named, or of all that are logged.

    Log the norm of the gradients too, and it speaks of them: `run.log(loss=loss, grad_norm=norm)`.

    >>> NotFinite()
    NotFinite()
    """

    names_tensors = True  # when it stops a run, it is worth a look at which tensors are not finite

    def __init__(self, *metrics: str, outcome: str = FAILURE) -> None:
        self._metrics = tuple(check_metric("NotFinite", metric) for metric in metrics)
        super().__init__(outcome)

    def __repr__(self) -> str:
        return f"NotFinite({', '.join(map(repr, self._metrics))})"

    @property
    def key(self) -> str:
        return f"{self.kind}({', '.join(self._metrics)})"

    def reset(self) -> None:
        self._found: dict[str, tuple[float, int]] = {}  # with the step

    def sees(self, name: str) -> bool:
        return not self._metrics or name in self._metrics

    def see(self, name: str, value: float, step: int) -> None:
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


class Diverged(Leaf):
    """A metric has become worse than `factor` times its best value, or is not finite any more.

    With `patience`, so many values in a row.

    >>> Diverged("loss", factor=10)
    Diverged('loss', factor=10, patience=1)
    """

    def __init__(
        self, metric: str, factor: float, *, patience: int = 1, outcome: str = FAILURE
    ) -> None:
        self.metric = check_metric("Diverged", metric)
        self.factor = check_number("Diverged(factor)", factor, least=1.0, is_open=True)
        check_count(patience, f"Diverged(patience={patience!r})", least=1)
        self.patience = patience
        super().__init__(outcome)

    def __repr__(self) -> str:
        return f"Diverged({self.metric!r}, factor={self.factor:g}, patience={self.patience})"

    def reset(self) -> None:
        self._best: float | None = None
        self._best_step = 0
        self._last: float | None = None
        self._worse = 0  # values in a row

    def see(self, name: str, value: float, step: int) -> None:  # noqa: ARG002  its only one
        self._last = value
        if not math.isfinite(value):
            self._worse += 1
        elif self._best is None or value < self._best:
            self._best, self._best_step, self._worse = value, step, 0
        elif self._best and value > self._best + (self.factor - 1) * abs(self._best):
            self._worse += 1
        else:
            self._worse = 0

    def holds(self) -> bool:
        return self._worse >= self.patience

    def because(self) -> str:
        last = math.nan if self._last is None else self._last
        if self._best is None:
            return f"{self.metric} is {told(last)}, and never was finite"
        often = f", {self._worse} values in a row" if self.patience > 1 else ""
        worse = f"more than {told(self.factor)} times its best"
        if not math.isfinite(last):
            worse = "not finite any more; its best was"
        return f"{self.metric} is {told(last)}, {worse} {told(self._best)} of step " + (
            f"{self._best_step}{often}"
        )

    def state(self) -> dict[str, Any]:
        return {
            "best": plain(self._best),
            "best_step": self._best_step,
            "last": plain(self._last),
            "worse": self._worse,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._best, self._last = from_plain(state["best"]), from_plain(state["last"])
        self._best_step, self._worse = int(state["best_step"]), int(state["worse"])
