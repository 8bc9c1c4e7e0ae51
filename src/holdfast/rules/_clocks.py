"""Rules that go by what a run has used: time, steps, samples."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from holdfast._errors import SettingsError
from holdfast._settings import check_count
from holdfast.rules._base import SUCCESS, Leaf, check_number, told

SAMPLES = "samples"
_STEPS_BEFORE_A_WORD = 10


class Budget(Leaf):
    """The run has used up its hours, steps or samples, those of all its lives together.

    Samples are what `run.log(samples=…)` is given: how many this step was trained on, by this
    rank. The hours are those in which the run was open.

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
            self._limit = check_number("Budget(hours)", limit, least=0.0, is_open=True)
        else:
            check_count(limit, f"Budget({self._what}={limit!r})", least=1)
            self._limit = float(limit or 0)
        super().__init__(outcome)

    def __repr__(self) -> str:
        return f"Budget({self._what}={self._limit:g})"

    @property
    def key(self) -> str:
        return f"{self.kind}({self._what})"

    @property
    def wants_samples(self) -> bool:
        """Whether nothing can come of it, since nobody tells how many samples there were."""
        return self._what == SAMPLES and not self._used and self._ticks >= _STEPS_BEFORE_A_WORD

    def reset(self) -> None:
        self._used = 0.0  # by the lives before; of samples, by this one too
        self._steps = 0
        self._ticks = 0
        self._world = 1
        self._since = time.monotonic()

    def sees(self, name: str) -> bool:
        return name == SAMPLES and self._what == SAMPLES

    def see(self, name: str, value: float, step: int) -> None:  # noqa: ARG002  its only one
        # All ranks train alike; what the others were given they do not tell at each step.
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
        return f"{told(self._now())} of {told(self._limit)} {self._what} are used"

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
                f"At({moment!r}): this is no moment.\n"
                "Give a datetime, or a text with date and time such as '2026-03-01 18:00'."
            )
        self._moment = found
        self._seconds = found.timestamp()
        super().__init__(outcome)

    def __repr__(self) -> str:
        return f"At({str(self._moment)!r})"

    def holds(self) -> bool:
        return time.time() >= self._seconds

    def because(self) -> str:
        return f"it is {self._moment}"
