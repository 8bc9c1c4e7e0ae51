"""What one check of `holdfast doctor` found: a fact that was measured, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["ok", "warn", "fail"]

# From harmless to grave: the table ends with what matters, next to the prompt.
STATES: tuple[State, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Check:
    """`found` is what was measured, `remedy` what to do: each one line without a full stop."""

    name: str  # one or two words, the same in every run: scripts look for it
    state: State
    found: str
    remedy: str = ""  # "" where there is nothing to do
    data: dict[str, Any] = field(default_factory=dict)  # plain values only: it becomes JSON

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": self.state,
            "found": self.found,
            "remedy": self.remedy,
            "data": self.data,
        }


def worst(checks: Iterable[Check]) -> State:
    """The gravest state among them; nothing checked is nothing wrong."""
    return max((check.state for check in checks), key=STATES.index, default="ok")
