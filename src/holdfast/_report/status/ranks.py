"""The ranks of a run as its heartbeat has them: a line for each, of many for the slowest few."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast import _text
from holdfast._environment.processes.identity import ProcessIdentity
from holdfast._report.status import told
from holdfast._store.folder.attempts import keeper_of, read_json
from holdfast._store.folder.layout import RunLayout

_MOST_LINES = 8
_ENDED_LINES = _SLOW_LINES = 4  # of many ranks


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank at one moment, as its keeper has told that of rank 0."""

    rank: int
    host: str | None
    pid: int | None
    step: int | None
    memory_step: int | None
    phase: str | None
    boundary_age_seconds: float | None
    ended: str | None  # how, if it has


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that the others wait for."""

    rank: int
    host: str | None
    seconds: float  # that they wait in each step


@dataclass(frozen=True, slots=True)
class RankDeath:
    """A rank that died, as the journal has it."""

    rank: int
    host: str | None
    how: str
    step: int | None


def read_death(event: dict[str, Any]) -> RankDeath:
    """What a `rank-died` of the journal says."""
    rank, how = told.whole(event.get("rank")), told.text(event.get("how"))
    host, step = told.text(event.get("host")), told.whole(event.get("step"))
    return RankDeath(-1 if rank is None else rank, host or None, how or "died", step)


def read_ranks(beat: dict[str, Any]) -> list[RankSummary]:
    """The ranks in a heartbeat; none of a run that is one process."""
    found = beat.get("ranks")
    since = max(0.0, time.time() - (told.real(beat.get("time")) or time.time()))
    return [
        RankSummary(
            rank=number,
            host=told.text(each.get("host")),
            pid=told.whole(each.get("pid")),
            step=told.whole(each.get("step")),
            memory_step=told.whole(each.get("memory_step")),
            phase=told.text(each.get("phase")),
            # Told by each rank's keeper at a moment of its own, some time before this heartbeat.
            boundary_age_seconds=_later(
                each.get("boundary_age_seconds"),
                since + (_later(each.get("heard_seconds"), 0.0) or 0.0),
            ),
            ended=told.text(each.get("ended")),
        )
        for number, each in enumerate(found if isinstance(found, list) else [])
        if isinstance(each, dict)
    ]


def read_straggler(beat: dict[str, Any]) -> Straggler | None:
    """The straggler in a heartbeat, if one is named."""
    found = beat.get("straggler")
    if not isinstance(found, dict) or not isinstance(found.get("rank"), int):
        return None
    waited = told.real(found.get("seconds")) or 0.0
    return Straggler(found["rank"], told.text(found.get("host")), waited)


def keepers_of(layout: RunLayout, attempt: int) -> list[ProcessIdentity]:
    """The keepers of all ranks of an attempt, as far as they have left a note."""
    found = [keeper_of(layout, attempt)]
    folder = layout.ranks(attempt)
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        with contextlib.suppress(KeyError, TypeError):
            found.append(ProcessIdentity(**read_json(path)["keeper"]))
    return list(dict.fromkeys(each for each in found if each is not None))


def describe_ranks(
    ranks: Sequence[RankSummary], deaths: Sequence[RankDeath], *, is_live: bool
) -> str:
    """How many there are, and where each is; of many, those that are gone and the slowest.

    Of a run that has ended the last heartbeat may be seconds old, and only deaths are told.
    """
    if not ranks:
        return ""
    hosts = {each.host for each in ranks if each.host}
    where = f" on {len(hosts)} hosts" if len(hosts) > 1 else "".join(f" on {h}" for h in hosts)
    lines = [f"{len(ranks)}{_text.name(where)}"]
    if not is_live:
        lines += map(_death_at, deaths[:_MOST_LINES])
        return "\n".join(lines)
    shown = list(ranks) if len(ranks) <= _MOST_LINES else _most_telling(ranks)
    digits = len(str(max(each.rank for each in shown)))
    for each in shown:
        host = f" on {_text.name(each.host or '?')}" if len(hosts) > 1 else ""
        lines.append(f"rank {each.rank:>{digits}}{host}: {_state(each)}")
    rest = [each for each in ranks if each not in shown]
    if rest:
        lines.append(f"and {len(rest)} more{_span(rest)}")
    return "\n".join(lines)


def describe_straggler(found: Straggler | None) -> str:
    if found is None:
        return ""
    host = f" on {_text.name(found.host)}" if found.host else ""
    wait = _text.duration(found.seconds)
    return f"rank {found.rank}{host}: the others wait {wait} for it in each step"


def _most_telling(ranks: Sequence[RankSummary]) -> list[RankSummary]:
    """Those that are gone, then the furthest behind."""
    ended = [each for each in ranks if each.ended is not None][:_ENDED_LINES]
    training = sorted((each for each in ranks if each.ended is None), key=_slowness)
    return sorted([*ended, *training[:_SLOW_LINES]], key=_number)


def _number(each: RankSummary) -> int:
    return each.rank


def _slowness(each: RankSummary) -> tuple[int, float]:
    return each.step or 0, -(each.boundary_age_seconds or 0.0)


def _state(each: RankSummary) -> str:
    if each.step is None:
        return "not heard of yet" if each.ended is None else _text.name(each.ended)
    text = f"step {each.step}"
    if each.memory_step is not None:
        text += f", {each.memory_step} in memory"
    if each.ended is not None:
        return f"{text}, {'left' if each.ended == 'closed' else _text.name(each.ended)}"
    age = _text.duration(each.boundary_age_seconds or 0.0)
    if each.phase is not None:
        return f"{text}, in {_text.name(each.phase)} since {age}"
    return f"{text}, made {age} ago"


def describe_death(found: RankDeath) -> str:
    """Which rank died, and how."""
    host = f" on {_text.name(found.host)}" if found.host else ""
    return f"rank {found.rank}{host} {_text.name(found.how)}"


def _death_at(found: RankDeath) -> str:
    return describe_death(found) + ("" if found.step is None else f" at step {found.step}")


def _span(ranks: Sequence[RankSummary]) -> str:
    steps = [each.step for each in ranks if each.step is not None]
    if not steps:
        return ""
    first, last = min(steps), max(steps)
    return f", at step {first}" if first == last else f", at steps {first} to {last}"


def _later(age: object, seconds: float) -> float | None:
    known = told.real(age)
    return None if known is None else known + seconds
