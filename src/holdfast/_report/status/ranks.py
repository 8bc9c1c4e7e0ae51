"""The ranks of a run by its heartbeat: a line for each; of many, for the slowest few."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast import _text
from holdfast._environment.processes.identity import ProcessIdentity
from holdfast._store.folder.attempts import keeper_of, read_json
from holdfast._store.folder.layout import RunLayout

_MOST_LINES = 8
_ENDED_LINES = _SLOW_LINES = 4  # of many ranks


@dataclass(frozen=True, slots=True)
class RankSummary:
    """One rank at one moment, as its keeper has reported to the keeper of rank 0."""

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
    """A rank that died, by the journal."""

    rank: int
    host: str | None
    how: str
    step: int | None


def read_death(event: dict[str, Any]) -> RankDeath:
    """From an event `rank-died` of the journal."""
    rank, step = _text.whole(event.get("rank")), _text.whole(event.get("step"))
    host, how = _text.text(event.get("host")), _text.text(event.get("how"))
    return RankDeath(-1 if rank is None else rank, host or None, how or "died", step)


def read_ranks(beat: dict[str, Any]) -> list[RankSummary]:
    """The ranks in a heartbeat; none for a run of one process."""
    found = beat.get("ranks")
    since = max(0.0, time.time() - (_text.real(beat.get("time")) or time.time()))
    return [
        RankSummary(
            rank=number,
            host=_text.text(each.get("host")) or None,
            pid=_text.whole(each.get("pid")),
            step=_text.whole(each.get("step")),
            memory_step=_text.whole(each.get("memory_step")),
            phase=_text.text(each.get("phase")) or None,
            # As of the last report of its keeper, some time before this heartbeat.
            boundary_age_seconds=_add(
                each.get("boundary_age_seconds"),
                since + (_text.real(each.get("heard_seconds")) or 0.0),
            ),
            ended=_text.text(each.get("ended")) or None,
        )
        for number, each in enumerate(found if isinstance(found, list) else [])
        if isinstance(each, dict)
    ]


def read_straggler(beat: dict[str, Any]) -> Straggler | None:
    found = beat.get("straggler")
    if not isinstance(found, dict) or not isinstance(found.get("rank"), int):
        return None
    waited = _text.real(found.get("seconds")) or 0.0
    return Straggler(found["rank"], _text.text(found.get("host")) or None, waited)


def keepers_of(layout: RunLayout, attempt: int) -> list[ProcessIdentity]:
    """The keepers of all ranks of an attempt, as far as they have left a record."""
    found = [keeper_of(layout, attempt)]
    folder = layout.ranks(attempt)
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        with contextlib.suppress(KeyError, TypeError):
            found.append(ProcessIdentity(**read_json(path)["keeper"]))
    return list(dict.fromkeys(each for each in found if each is not None))


def describe_ranks(
    ranks: Sequence[RankSummary], deaths: Sequence[RankDeath], *, is_live: bool
) -> str:
    """How many there are, and where each is; of many, those that have ended and the slowest.

    After the end of a run its last heartbeat is out of date, so only deaths are listed.
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
    """Those that have ended, then the furthest behind."""
    ended = [each for each in ranks if each.ended is not None][:_ENDED_LINES]
    training = [each for each in ranks if each.ended is None]
    training.sort(key=lambda each: (each.step or 0, -(each.boundary_age_seconds or 0.0)))
    return sorted([*ended, *training[:_SLOW_LINES]], key=lambda each: each.rank)


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


def _add(age: object, seconds: float) -> float | None:
    known = _text.real(age)
    return None if known is None else known + seconds
