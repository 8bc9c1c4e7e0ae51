"""The parts of a summary, each read from the records of a run, and in words.

These are its ranks, what holds it up (a hang, a debugger, a profiler), its SLURM job, its mirror
and its progress. Neither SLURM nor the mirror is asked.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from holdfast import _text
from holdfast._environment.processes.identity import ProcessIdentity
from holdfast._report.json_lines import Record, parse
from holdfast._store.folder import series
from holdfast._store.folder.attempts import identity_in, keeper_of, read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.plain_file import read_end

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Read = TypeVar("Read", bound=DataclassInstance)

_MOST_LINES = 8
_ENDED_LINES = _SLOW_LINES = 4  # of many ranks
_SLOWER = 1.5  # times as long as usual, to be worth a line
_STANDING = re.compile(r"^(No step|No output and no work) for [\d.]+ (?:ms|s|min|h|days)(?=[:.]|$)")


_READERS: dict[Any, Callable[[object], object]] = {
    "int | None": _text.whole,
    "float | None": _text.real,
    "str": _text.text,
    "str | None": lambda value: _text.text(value) or None,
}


def read_fields(kind: type[Read], record: Mapping[str, Any], **given: object) -> Read:
    """A dataclass from a record that may hold anything; what does not fit is None."""
    for each in fields(kind):
        if each.name not in given:
            given[each.name] = _READERS[each.type](record.get(each.name))
    return kind(**given)


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
    rank: int
    host: str | None
    seconds: float  # that they wait in each step


@dataclass(frozen=True, slots=True)
class RankDeath:
    rank: int
    host: str | None
    how: str
    step: int | None


def read_death(event: dict[str, Any]) -> RankDeath:
    rank, how = _text.whole(event.get("rank")), _text.text(event.get("how"))
    return read_fields(RankDeath, event, rank=-1 if rank is None else rank, how=how or "died")


def read_ranks(beat: dict[str, Any]) -> list[RankSummary]:
    """The ranks in a heartbeat; none for a run of one process."""
    since = max(0.0, time.time() - (_text.real(beat.get("time")) or time.time()))
    ranks, found = beat.get("ranks"), []
    for number, each in enumerate(ranks if isinstance(ranks, list) else []):
        if isinstance(each, dict):
            # As of the last report of its keeper, some time before this heartbeat.
            age, heard = _text.real(each.get("boundary_age_seconds")), each.get("heard_seconds")
            age = None if age is None else age + since + (_text.real(heard) or 0.0)
            found.append(read_fields(RankSummary, each, rank=number, boundary_age_seconds=age))
    return found


def read_straggler(beat: dict[str, Any]) -> Straggler | None:
    found = _text.record(beat.get("straggler"))
    rank, waited = found.get("rank"), _text.real(found.get("seconds")) or 0.0
    if not isinstance(rank, int):
        return None
    return read_fields(Straggler, found, rank=rank, seconds=waited)


def keepers_of(layout: RunLayout, attempt: int) -> list[ProcessIdentity]:
    """The keepers of all ranks of an attempt, as far as they have left a record."""
    paths = sorted(layout.ranks(attempt).glob("*.json"))
    found = [keeper_of(layout, attempt), *(identity_in(read_json(p).get("keeper")) for p in paths)]
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
        for death in deaths[:_MOST_LINES]:
            at = "" if death.step is None else f" at step {death.step}"
            lines.append(describe_death(death) + at)
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
    wait = _text.duration(found.seconds)
    return f"{_rank(found)}: the others wait {wait} for it in each step"


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
    return f"{_rank(found)} {_text.name(found.how)}"


def _rank(found: RankDeath | Straggler) -> str:
    return f"rank {found.rank} on {_text.name(found.host)}" if found.host else f"rank {found.rank}"


def _span(ranks: Sequence[RankSummary]) -> str:
    steps = [each.step for each in ranks if each.step is not None]
    if not steps:
        return ""
    first, last = min(steps), max(steps)
    return f", at step {first}" if first == last else f", at steps {first} to {last}"


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
    found = beat.get("hang")
    return read_fields(Stuck, found) if isinstance(found, dict) else None


def read_paused(beat: dict[str, Any]) -> Paused | None:
    if not isinstance(found := beat.get("paused"), dict):
        return None
    return read_fields(Paused, found, by=_text.text(found.get("by")) or "a debugger")


def read_disturbed(beat: dict[str, Any]) -> Disturbed | None:
    found = _text.record(beat.get("pace"))
    by, usual, now = found.get("disturbed"), found.get("usual"), found.get("now")
    if not isinstance(by, list) or not by:
        return None
    return Disturbed(list(map(str, by)), _text.real(usual), _text.real(now))


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
    since = ""
    if found.since is not None:
        since = f"since {_text.duration(max(0.0, time.time() - found.since))}: "
    return f"{since}{who} by {_text.name(found.by)}{others}. It is not called a hang."


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


@dataclass(frozen=True, slots=True)
class JobSummary:
    id: str
    restarts: int
    seconds_left: float | None  # None: it is over, has no limit, or SLURM did not say
    warning_seconds: float | None  # None: its script asks for none
    step_seconds: float | None  # measured: the slowest recent one
    save_seconds: float | None
    requeue: str | None  # whether it was requeued when the last attempt was interrupted


def read_job(
    layout: RunLayout, attempt: int, beat: dict[str, Any], live: bool
) -> JobSummary | None:
    """From the heartbeat of the keeper, and from its record at the end."""
    found = _text.record(beat.get("slurm"))
    if not isinstance(found.get("job"), str):
        return None
    end = _text.real(found.get("end"))
    said = read_json(layout.requeue(attempt)).get("said")
    return read_fields(
        JobSummary,
        {**beat, **found},
        id=found["job"],
        restarts=int(_text.real(found.get("restarts")) or 0),
        seconds_left=max(0.0, end - time.time()) if live and end is not None else None,
        requeue=said if isinstance(said, str) and not live else None,
    )


def describe_job(job: JobSummary | None, *, is_live: bool) -> str:
    if job is None:
        return ""
    text = f"job {job.id}"
    if job.restarts:
        text += f", restarted {_text.count(job.restarts, 'time')}"
    if not is_live:
        return text
    if job.seconds_left is not None:
        text += f", {_text.duration(job.seconds_left)} left"
    return f"{text}; {_describe_warning(job)}"


def _describe_warning(job: JobSummary) -> str:
    needed = (job.step_seconds or 0.0) + (job.save_seconds or 0.0)
    takes = "no save has been measured yet"
    if job.save_seconds is not None:
        takes = f"a step and its save take {_text.duration(needed)}"
    if job.warning_seconds is None:
        return f"its script has no line with --signal; {takes}"
    text = f"SLURM warns {_text.duration(job.warning_seconds)} before the end; {takes}"
    if job.save_seconds is not None and needed > job.warning_seconds:
        return f"{text}: ask for --signal=USR2@{2 * needed + 30:.0f}"
    return text


@dataclass(frozen=True, slots=True)
class MirrorSummary:
    """A mirror as the process that copies to it has last recorded."""

    address: str
    step: int | None  # the newest there
    age_seconds: float | None  # of that checkpoint
    count: int
    copying_step: int | None
    copied_bytes: int | None
    copying_bytes: int | None
    trouble: str | None


def read_mirror(layout: RunLayout) -> MirrorSummary | None:
    """None if the run has none, or never had."""
    record = read_json(layout.mirror)
    address = record.get("address")
    if not isinstance(address, str):
        return None
    held = _text.records(record.get("checkpoints"))
    copying = _text.record(record.get("under_way"))
    saved_at = record.get("newest_saved_at")
    return read_fields(
        MirrorSummary,
        record,
        step=_text.whole(held[-1].get("step")) if held else None,
        age_seconds=max(0.0, time.time() - saved_at) if isinstance(saved_at, float) else None,
        count=len(held),
        copying_step=_text.whole(copying.get("step")),
        copied_bytes=_text.whole(copying.get("done_bytes")),
        copying_bytes=_text.whole(copying.get("total_bytes")),
    )


def describe_mirror(mirror: MirrorSummary | None) -> str:
    if mirror is None:
        return ""
    text = "nothing yet"
    if mirror.step is not None:
        age = mirror.age_seconds
        old = "" if age is None else f", {_text.duration(age)} old"
        text = f"step {mirror.step}{old} ({_text.count(mirror.count, 'checkpoint')})"
    text += f" in {_text.name(mirror.address)}"
    if mirror.trouble:
        trouble = mirror.trouble.partition("\n")[0].removeprefix(f"{mirror.address}: ")
        return f"{text}; {_text.name(trouble)}"
    if mirror.copying_step is not None and mirror.copied_bytes is not None:
        text += f"; copying step {mirror.copying_step}: {_text.size(mirror.copied_bytes)}"
        if mirror.copying_bytes is not None:
            text += f" of {_text.size(mirror.copying_bytes)}"
    return text


# -- How fast it is, and its newest metrics, by the end of its series ------------------------------
_TAIL_BYTES = 16 << 10  # about a minute of rows
_RATE_SECONDS = 60.0
_MOST_METRICS = 50
_MOST_NAME = 200
BAR_CELLS = 20


def read_progress(path: Path, now: float) -> tuple[float | None, dict[str, float]]:
    """Steps in a second and the newest finite value of each metric, by the end of a series."""
    rows = _last_rows(path)
    newest: dict[str, float] = {}
    for row in rows:
        for name, values in _text.record(row.get("m")).items():
            value = _text.real(values[0]) if isinstance(values, list) and values else None
            is_known = name in newest or len(newest) < _MOST_METRICS
            if value is not None and is_known and len(name) <= _MOST_NAME:
                newest[name] = value
    return _rate(rows, now), newest


def seconds_left(step: int | None, total: int | None, rate: float | None) -> float | None:
    if step is None or total is None or not rate:
        return None
    return max(0, total - step) / rate


def share_done(step: int | None, total: int | None) -> float | None:
    """From 0 to 1; None if it is unknown how many steps there will be."""
    if step is None or not total:
        return None
    return max(0.0, min(1.0, step / total))


def bar(share: float, cells: int = BAR_CELLS) -> str:
    """A progress bar in plain characters; full only at the end.

    >>> bar(0.5, 10), bar(0.999, 10)
    ('[#####.....]', '[#########.]')
    """
    full = int(share * cells)
    return f"[{'#' * full}{'.' * (cells - full)}]"


def main_metric(names: Iterable[str]) -> str | None:
    """The metric that a reader wants to see first: the training loss, if there is one.

    >>> main_metric(["lr", "val_loss", "train/loss"]), main_metric(["acc", "lr"])
    ('train/loss', 'acc')
    """
    known = list(names)

    def order(name: str) -> tuple[int, int]:
        words = name.lower()
        is_later = any(each in words for each in ("val", "eval", "test"))
        rank = 0 if words == "loss" else 1 if "loss" in words else 3
        return rank + is_later, known.index(name)

    return min(known, key=order, default=None)


def _last_rows(path: Path) -> list[Record]:
    rows = parse(read_end(path, _TAIL_BYTES).rpartition(b"\n")[0])  # the last may be incomplete
    real, whole = _text.real, _text.whole
    return [r for r in rows if series.is_row(r) and None not in (real(r["t"]), whole(r["s"]))]


def _rate(rows: list[Record], now: float) -> float | None:
    """Steps in a second, in the last minute; None if none was made then."""
    if not rows:
        return None
    end = float(rows[-1]["t"])
    recent = [row for row in rows if float(row["t"]) >= end - _RATE_SECONDS]
    first, last = recent[0], recent[-1]
    seconds, steps = last["t"] - first["t"], last["s"] - first["s"]
    if now - end > 2 * _RATE_SECONDS or seconds <= 0 or steps <= 0:
        return None
    return float(steps / seconds)
