"""The result of one check of `holdfast doctor`: a measured fact, and the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from holdfast._environment.processes.proc import FairDeadline

State = Literal["ok", "warn", "fail"]

# From harmless to grave: the table ends with the gravest, next to the prompt.
STATES: tuple[State, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Check:
    """`found` is what was measured, `remedy` what to do: each one line without a full stop."""

    name: str  # one or two words, the same in every run: scripts search for it
    state: State
    found: str
    remedy: str = ""  # "" where there is nothing to do
    data: dict[str, Any] = field(default_factory=dict)  # plain values only: it becomes JSON

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def worst(checks: Iterable[Check]) -> State:
    """The gravest state of all; "ok" without any check."""
    return max((check.state for check in checks), key=STATES.index, default="ok")


def slow(name: str, what: str, deadline: FairDeadline) -> Check | None:
    """The check for something that was late on a busy machine; None: the machine was not busy."""
    if not deadline.is_starved():
        return None
    load = os.getloadavg()[0]
    found = f"slow: {what}, the machine is busy (load {load:.0f})"
    return Check(name, "warn", found, "try again when fewer processes compute", {"load": load})
