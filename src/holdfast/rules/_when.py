"""A rule of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast._errors import SettingsError
from holdfast.rules._base import SUCCESS, Leaf

_TEXT_LENGTH = 300
_MOST_VALUES = 6


class Seen(Mapping[str, float]):
    """The newest value of each metric, by its name, and the step."""

    def __init__(self, values: Mapping[str, float], step: int) -> None:
        self._values = values
        self.step = step
        self.missed: str | None = None  # a metric that was asked for, and not logged yet

    def __getitem__(self, name: str) -> float:
        if name not in self._values:
            self.missed = name
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class When(Leaf):
    """A function of the user's own says so: by something true, or by a text that says why.

    It is given the newest value of each metric, at each boundary in whose step something was
    logged. While it asks for a metric that was not logged yet, it does not hold.

    >>> When(lambda seen: seen["loss"] < 0.1 and seen.step > 100)  # doctest: +ELLIPSIS
    When(<lambda>, outcome='success')
    """

    asks_for_any = True

    def __init__(self, check: Callable[[Seen], object], *, outcome: str = SUCCESS) -> None:
        if not callable(check):
            raise SettingsError(
                f"When({check!r}): this cannot be called.\n"
                "Give a function of the metrics: When(lambda seen: seen['loss'] < 0.1)"
            )
        self._check = check
        super().__init__(outcome)

    @property
    def _name(self) -> str:
        return str(getattr(self._check, "__name__", type(self._check).__name__))

    def __repr__(self) -> str:
        return f"When({self._name}, outcome={self.outcome!r})"

    @property
    def key(self) -> str:
        return f"{self.kind}({self._name})"

    def reset(self) -> None:
        self._said = ""
        self._holds = False

    def sees(self, name: str) -> bool:  # noqa: ARG002  it may ask for any
        return True

    def look(self, latest: Mapping[str, float], step: int) -> None:
        seen = Seen(latest, step)
        try:
            found = self._check(seen)
        except KeyError:
            if seen.missed is None:
                raise  # a mistake of its own
            found = False
        self._holds = bool(found)
        if isinstance(found, str):
            self._said = found[:_TEXT_LENGTH]
        elif self._holds:
            values = [f"{name} {value:.6g}" for name, value in latest.items()]
            self._said = f"{self._name} says so ({', '.join(values[:_MOST_VALUES])})"

    def holds(self) -> bool:
        return self._holds

    def because(self) -> str:
        return self._said

    def state(self) -> dict[str, Any]:
        return {"holds": self._holds, "said": self._said}

    def load(self, state: Mapping[str, Any]) -> None:
        self._holds, self._said = bool(state["holds"]), str(state["said"])
