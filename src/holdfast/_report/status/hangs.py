"""What holds a live run up, as its heartbeat has it: a hang, a debugger, a profiler."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import _text as words
from holdfast._report.status import told

_SLOWER = 1.5  # times as long as usual, to be worth a line


@dataclass(frozen=True, slots=True)
class Stuck:
    """A hang that has been found and is not over."""

    since: float | None  # by the clock of the run's machine
    cause: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Paused:
    """Somebody holds a rank, in a debugger or by a signal; the others wait for it."""

    since: float | None
    by: str
    rank: int | None


@dataclass(frozen=True, slots=True)
class Disturbed:
    """What makes the run slower than it was, and by how much."""

    by: list[str]
    usual_step_seconds: float | None
    step_seconds: float | None


def read_stuck(beat: dict[str, Any]) -> Stuck | None:
    found = beat.get("hang")
    if not isinstance(found, dict):
        return None
    return Stuck(
        told.real(found.get("since")), _text(found.get("cause")), _text(found.get("sentence"))
    )


def read_paused(beat: dict[str, Any]) -> Paused | None:
    found = beat.get("paused")
    if not isinstance(found, dict):
        return None
    rank = found.get("rank")
    by = _text(found.get("by")) or "a debugger"
    return Paused(told.real(found.get("since")), by, rank if isinstance(rank, int) else None)


def read_disturbed(beat: dict[str, Any]) -> Disturbed | None:
    found = beat.get("pace")
    by = found.get("disturbed") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(by, list) or not by:
        return None
    return Disturbed(list(map(str, by)), told.real(found.get("usual")), told.real(found.get("now")))


def describe_stuck(found: Stuck | None, folder: Path) -> str:
    if found is None:
        return ""
    said = words.name(found.sentence) or "no step is made any more."
    return f"{_since(found.since)}{said} More: {words.command('why', folder)}"


def describe_paused(found: Paused | None, *, has_ranks: bool) -> str:
    if found is None:
        return ""
    who = f"rank {found.rank} is held" if has_ranks and found.rank is not None else "held"
    others = "; the others wait for it" if has_ranks else ""
    return f"{_since(found.since)}{who} by {words.name(found.by)}{others}. It is not called a hang."


def describe_disturbed(found: Disturbed | None) -> str:
    """By what it is slowed down; nothing if it is as fast as ever."""
    if found is None:
        return ""
    by, usual, now = words.name(", ".join(found.by)), found.usual_step_seconds, found.step_seconds
    if usual is None or now is None:
        return f"{by} may make it slower"
    if now < _SLOWER * usual:
        return ""
    return f"by {by}: a step takes {_short(now)}, without it {_short(usual)}"


def _short(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _since(moment: float | None) -> str:
    if moment is None:
        return ""
    return f"since {words.duration(max(0.0, time.time() - moment))}: "


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
