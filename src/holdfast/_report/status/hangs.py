"""What holds a live run up, by its heartbeat: a hang, a debugger, a profiler."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import _text

_SLOWER = 1.5  # times as long as usual, to be worth a line
_STANDING = re.compile(r"^(No step|No output and no work) for [\d.]+ (?:ms|s|min|h|days)(?=[:.]|$)")


@dataclass(frozen=True, slots=True)
class Stuck:
    """A hang that has been found and is not over."""

    since: float | None  # by the clock of the run's machine
    cause: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Paused:
    """A rank is held, in a debugger or by a signal; the others wait for it."""

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
    if not isinstance(found := beat.get("hang"), dict):
        return None
    cause, sentence = _text.text(found.get("cause")), _text.text(found.get("sentence"))
    return Stuck(_text.real(found.get("since")), cause, sentence)


def read_paused(beat: dict[str, Any]) -> Paused | None:
    if not isinstance(found := beat.get("paused"), dict):
        return None
    rank = found.get("rank")
    by = _text.text(found.get("by")) or "a debugger"
    return Paused(_text.real(found.get("since")), by, rank if isinstance(rank, int) else None)


def read_disturbed(beat: dict[str, Any]) -> Disturbed | None:
    found = _text.record(beat.get("pace"))
    by = found.get("disturbed")
    if not isinstance(by, list) or not by:
        return None
    return Disturbed(
        list(map(str, by)), _text.real(found.get("usual")), _text.real(found.get("now"))
    )


def describe_stuck(found: Stuck | None, folder: Path) -> str:
    if found is None:
        return ""
    said = _text.name(found.sentence) or "No step is made any more."
    if found.since is not None:
        said = tell_duration(said, max(0.0, time.time() - found.since))
    return f"{said} More: {_text.command('why', folder)}"


def tell_duration(sentence: str, seconds: float) -> str:
    """The sentence on a hang with the duration as it is now.

    The keeper wrote the sentence when it found the hang, and the hang has gone on since.
    """
    standing = f"for {_text.duration(seconds)}"
    found, count = _STANDING.subn(rf"\1 {standing}", sentence, count=1)
    return found if count else f"No step {standing}: {sentence}"


def describe_paused(found: Paused | None, *, has_ranks: bool) -> str:
    if found is None:
        return ""
    who = f"rank {found.rank} is held" if has_ranks and found.rank is not None else "held"
    others = "; the others wait for it" if has_ranks else ""
    return f"{_since(found.since)}{who} by {_text.name(found.by)}{others}. It is not called a hang."


def describe_disturbed(found: Disturbed | None) -> str:
    """What slows it down; nothing if it is as fast as before."""
    if found is None:
        return ""
    by, usual, now = _text.name(", ".join(found.by)), found.usual_step_seconds, found.step_seconds
    if usual is None or now is None:
        return f"{by} may make it slower"
    if now < _SLOWER * usual:
        return ""
    return f"by {by}: a step takes {_text.duration(now)}, without it {_text.duration(usual)}"


def _since(moment: float | None) -> str:
    if moment is None:
        return ""
    return f"since {_text.duration(max(0.0, time.time() - moment))}: "
