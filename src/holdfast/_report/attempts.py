"""One attempt, by the journal, its series and its own files; and how it ended.

Any of these may be missing: an older version wrote no series, a lost machine no exit, and a folder
may have been removed. Missing values stay unknown.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast import _errors, _text
from holdfast._report.json_lines import Record
from holdfast._report.view import Outcome
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._text import real, record, text, whole

_MOST_POINTS = 4096
_MOST_STRETCHES = 1000
_MOST_NAMES = 20  # of phases, in one row
_KEPT_EVENTS = 400  # for a verdict, which needs the last ones
_LONG_SAVE_SECONDS, _LONG_SAVE_SHARE = 2.0, 0.2  # of a row, to be drawn by itself


class Point(NamedTuple):
    """The step at a moment, and for how many seconds it had been held up by then."""

    t: float
    step: int
    save: float = 0.0
    agree: float = 0.0


class Stretch(NamedTuple):
    start: float
    end: float
    what: str = ""


@dataclass
class AttemptProcess:
    """Where an attempt ran, by its lease, and by its start."""

    pid: int | None = None
    host: str | None = None
    job: str | None = None
    job_started: float | None = None
    ranks: int = 1

    def take(self, found: Record) -> None:
        self.pid = whole(found.get("pid")) or self.pid
        self.host = text(found.get("host"), 200) or self.host
        self.job = _name(found.get("job")) or self.job
        self.job_started = real(found.get("job_started")) or self.job_started
        self.ranks = max(1, whole(found.get("ranks")) or self.ranks)


@dataclass(frozen=True)
class AttemptExit:
    """How an attempt left, by its own record."""

    is_recorded: bool = False
    status: int | None = None
    how: str = ""
    durable_step: int | None = None


@dataclass
class StepTimeline:
    """The steps of an attempt over time, and what held them up."""

    points: list[Point] = field(default_factory=list)  # by its series
    noted: list[Point] = field(default_factory=list)  # by the journal, which was read before
    saved: list[Point] = field(default_factory=list)  # by its checkpoints, if there is nothing else
    phases: list[Stretch] = field(default_factory=list)
    saves: list[Stretch] = field(default_factory=list)
    stuck: list[Stretch] = field(default_factory=list)  # the end of one that is not over: inf
    paused: list[Stretch] = field(default_factory=list)
    waits: dict[int, float] = field(default_factory=dict)  # by rank, in one recent step

    def note(self, t: float, step: int) -> None:
        last = self.noted[-1] if self.noted else Point(t, step)
        if t >= last.t and step >= last.step:
            self.noted.append(Point(t, step))
            _thin(self.noted)

    def take_row(self, first: Point, t: float, step: int, row: Mapping[str, Any]) -> None:
        """A row of its series; `first` is the point before all rows."""
        last = self.points[-1] if self.points else first
        t = max(t, last.t)  # a clock may have been set back
        span = t - last.t
        save, agree = _within(row.get("save"), span), _within(row.get("agree"), span)
        if rest := _within(row.get("rest"), span):
            self._take_phases(last.t, t, rest, row)
        if save >= _LONG_SAVE_SECONDS and save >= _LONG_SAVE_SHARE * span:
            _extend(self.saves, Stretch(t - save, t))
            save = 0.0
        self.points.append(Point(t, step, last.save + save, last.agree + agree))
        _thin(self.points)
        if isinstance(found := row.get("waits"), dict):
            waits = ((str(rank), real(seconds)) for rank, seconds in found.items())
            self.waits = {int(r): s for r, s in waits if r.isdecimal() and s is not None}

    def _take_phases(self, start: float, end: float, rest: float, row: Mapping[str, Any]) -> None:
        """A row does not say where a phase was: at its end if it goes on, else at its start."""
        now = text(row.get("phase"), 100)
        found = list(record(row.get("phases")).items())[:_MOST_NAMES]
        seconds = {text(name, 100): real(each) or 0.0 for name, each in found} or {now: rest}
        left = min(rest, end - start)
        for name in sorted(seconds, key=lambda name: name == now):
            took = min(left, max(0.0, seconds[name]))
            left -= took
            if took <= 0:
                continue
            if name == now:
                _extend(self.phases, Stretch(end - took, end, name))
            else:
                _extend(self.phases, Stretch(start, start + took, name))
                start += took
        if len(self.phases) > _MOST_STRETCHES:
            # The short ones would be invisible; they count as training.
            bar = sorted(each.end - each.start for each in self.phases)[len(self.phases) // 2]
            self.phases = [each for each in self.phases if each.end - each.start > bar]

    def steps(self) -> list[Point]:
        """The steps over time; the journal fills in where there is no series, and at both ends."""
        if not self.points:
            return list(_rising(sorted([*self.noted, *self.saved])))
        first, last = self.points[0], self.points[-1]
        before = [each for each in self.noted[:1] if each.t < first.t and each.step <= first.step]
        after = [
            last._replace(t=each.t, step=each.step)
            for each in self.noted[-2:]
            if each.t > last.t and each.step >= last.step
        ]
        return [*before, *self.points, *after]


@dataclass
class AttemptHistory:
    """One attempt: where it ran, how it ended, its steps over time, and what held them up."""

    number: int
    process: AttemptProcess = field(default_factory=AttemptProcess)
    began: float | None = None  # took the folder
    started: float | None = None  # had opened, with its state loaded
    first_step: int | None = None
    source: str = ""
    looped: float | None = None  # came to its first loop
    left_loop: float | None = None  # finished, or stops
    timeline: StepTimeline = field(default_factory=StepTimeline)
    died_at: float | None = None  # by its keeper
    is_finished: bool = False
    is_requeued: bool = False
    lost_ranks: list[str] = field(default_factory=list)  # how each of them died
    bad_step: int | None = None  # from which on it is bad, by a rule
    ended: float | None = None
    exit: AttemptExit = field(default_factory=AttemptExit)
    last_step: int | None = None
    last_seen: float | None = None
    events: deque[Record] = field(default_factory=lambda: deque(maxlen=_KEPT_EVENTS))

    def take(self, kind: str, t: float, event: Record) -> None:
        """An event of the journal."""
        self.events.append(event)
        self.see(t, whole(event.get("step")) if kind in _AT_STEP else None)
        if kind == "start":
            self.started, self.first_step = t, whole(event.get("step"))
            self.source = text(event.get("source"), 40)
            self.process.take(event)
            self.see(t, self.first_step)
        elif kind == "adopted":
            self.began = self.began or t
            self.first_step = whole(event.get("step"))
        elif kind == "loop":  # a script may have several, one after the other
            self.is_finished, self.left_loop, self.looped = False, None, self.looped or t
        elif kind in ("finished", "stop"):
            self.is_finished = self.is_finished or kind == "finished"
            self.left_loop = self.left_loop or t
        elif kind == "hang":
            stood = max(0.0, real(event.get("stood")) or 0.0)
            _open(self.timeline.stuck, t - stood, text(event.get("sentence"), 400))
        elif kind == "paused":
            _open(self.timeline.paused, t, text(event.get("by"), 200))
        elif kind in ("hang-over", "resumed"):
            _close(self.timeline.paused if kind == "resumed" else self.timeline.stuck, t)
        elif kind in ("exit", "death"):
            self.end(event, t)
        elif kind == "rank-died":
            self.lost_ranks.append(text(event.get("how"), 300))
            del self.lost_ranks[8:]
        elif kind == "requeue":
            self.is_requeued = whole(event.get("status")) in (None, _errors.REQUEUE)
        elif kind == "rule" and (bad := whole(event.get("void_from"))) is not None:
            self.bad_step = bad if self.bad_step is None else min(bad, self.bad_step)

    def take_lease(self, lease: Record) -> None:
        job = record(lease.get("job")).get("number")
        self.process.take({**record(lease.get("process")), "job": self.process.job or job})
        if (since := real(lease.get("since"))) is not None:
            self.began = since
            self.see(since, None)

    def end(self, found: Record, t: float | None) -> None:
        """By the record of its exit, or by an event of the journal."""
        status, durable_step = whole(found.get("status")), whole(found.get("durable_step"))
        self.exit = AttemptExit(True, status, text(found.get("how"), 1000), durable_step)
        if t is not None:
            self.ended = t
            step = whole(found.get("step"))
            self.see(t, None if self.exit.how.startswith("could not start") else step)

    def see(self, t: float, step: int | None) -> None:
        """It lived at this moment."""
        self._extend(t, step)
        if step is not None:
            self.timeline.note(t, step)

    def take_row(self, t: float, step: int, row: Mapping[str, Any]) -> None:
        """A row of its series."""
        began = t if self.started is None else min(t, self.started)
        self.timeline.take_row(Point(began, self.first_step or 0), t, step, row)
        self._extend(self.timeline.points[-1].t, step)

    def _extend(self, t: float, step: int | None) -> None:
        self.last_seen = t if self.last_seen is None else max(t, self.last_seen)
        if step is not None:
            self.last_step = step if self.last_step is None else max(step, self.last_step)

    @property
    def has_died(self) -> bool:
        """Whether it, or one of its ranks, ended without leaving by itself."""
        return bool(self.lost_ranks) or (self.exit.status is None and not self.is_finished)


def at_step(course: list[Point], step: int) -> Point:
    """When this step was complete, interpolated."""
    beyond = bisect_right(course, step, key=lambda point: point.step)
    if beyond == 0:
        return course[0]
    before = course[beyond - 1]
    if beyond == len(course) or before.step == step:
        return before
    after = course[beyond]
    share = (step - before.step) / (after.step - before.step)
    t, _, save, agree = (
        one + share * (other - one) for one, other in zip(before, after, strict=True)
    )
    return Point(t, step, save, agree)


def _rising(points: Iterable[Point]) -> Iterator[Point]:
    last = -1
    for point in points:
        if point.step >= last:
            last = point.step
            yield point


def _within(value: object, most: float) -> float:
    return min(most, max(0.0, real(value) or 0.0))


def _thin(points: list[Point]) -> None:
    if len(points) > _MOST_POINTS:
        del points[1:-1:2]


_AT_STEP = ("loop", "finished", "stop", "hang", "hang-over", "paused", "resumed", "slow", "rule")


def _open(found: list[Stretch], t: float, what: str) -> None:
    if not found or found[-1].end != float("inf"):
        found.append(Stretch(t, float("inf"), what))
        del found[:-_MOST_STRETCHES]


def _close(found: list[Stretch], t: float) -> None:
    if found and found[-1].end == float("inf"):
        found[-1] = found[-1]._replace(end=t)


def _extend(found: list[Stretch], more: Stretch) -> None:
    """Add a stretch; two that touch become one."""
    if found and more.start <= found[-1].end + 1e-3 and more.what == found[-1].what:
        more = Stretch(found[-1].start, max(found[-1].end, more.end), found[-1].what)
        found.pop()
    found.append(more)


def _name(value: object) -> str | None:
    return str(value) if isinstance(value, str | int) and value != "" else None


QUIET: tuple[Outcome, ...] = ("running", "finished", "closed", "stopped", "interrupted")
_BY_STATUS: dict[int, Outcome] = {
    _errors.FINISHED: "closed",
    _errors.BAD: "bad",
    _errors.NOT_DURABLE: "failed",
    _errors.REQUEUE: "interrupted",
    _errors.IDLE: "failed",
    _errors.HUNG: "hung",
    _errors.PERSON: "stopped",
    _errors.TERMINATED: "stopped",
    _errors.HUNG_UP: "stopped",
}
_BY_CAUSE: dict[str, Outcome] = {
    **dict.fromkeys(("oom-cgroup", "oom-machine", "oom-worker", "cuda-oom"), "out-of-memory"),
    **dict.fromkeys(
        ("segfault", "abort", "cxx-exception", "bus-error", "illegal-instruction"), "crashed"
    ),
    **dict.fromkeys(("preempted", "time-limit"), "interrupted"),
    **dict.fromkeys(("asked", "terminated"), "stopped"),
    **dict.fromkeys(("machine-lost", "unknown"), "lost"),
    "killed": "killed",
    "finished": "finished",
    "bad-training": "bad",
}
_NOW = {
    "starting": "It starts.",
    "stuck": "It stands still.",
    "paused": "It is held.",
    "stopping": "It was asked to stop, and is about to.",
}
_SENTENCES: dict[Outcome, str] = {
    "finished": "It trained to its end.",
    "closed": "It left by itself, before its end.",
    "stopped": "It was asked to stop{why}",
    "interrupted": "It was interrupted, to be started again{why}",
    "bad": "A rule called the training bad{why}",
}
_CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")


def by_record(history: AttemptHistory, *, is_live: bool) -> Outcome:
    """By its own records, without a verdict."""
    if is_live:
        return "running"
    if history.is_finished and history.exit.status in (0, None):
        return "finished"
    # When a rank dies, the launcher ends the others by a signal that they answer.
    if history.lost_ranks and history.exit.status in (None, *_errors.ASKED):
        return _of_death(history.lost_ranks[0])
    if history.exit.status is not None:
        found = _BY_STATUS.get(history.exit.status, "failed")
        # A job is ended by the scheduler, and comes back.
        is_job = history.exit.status == _errors.TERMINATED and history.process.job is not None
        return "interrupted" if is_job else found
    return _of_death(history.exit.how)


def _of_death(how: str) -> Outcome:
    if any(name in how for name in _CRASHES):
        return "crashed"
    return "killed" if "SIG" in how else "lost"


def by_verdict(cause: str, otherwise: Outcome, *, has_died: bool = False) -> Outcome:
    """By the verdict of `holdfast why`, where the records alone say little.

    A process that has died by a signal was not stopped, even if a person sent the signal: stopped
    means that the process saved its state and left.
    """
    if cause.startswith("hang-"):
        return "hung"
    if cause == "unknown":
        return otherwise
    found = _BY_CAUSE.get(cause, "failed" if otherwise in ("lost", "closed") else otherwise)
    if found == "stopped" and has_died:
        return "killed" if otherwise in QUIET or otherwise == "lost" else otherwise
    return found


def sentence(history: AttemptHistory, outcome: Outcome, state: str = "training") -> str:
    how = history.exit.how.partition("\n")[0]
    why = "." if how in ("", "closed", "died", "left") else _text.sentence(f": {how}")
    if outcome == "running":
        return _NOW.get(state, "It trains.")
    if outcome in _SENTENCES:
        return _SENTENCES[outcome].format(why=why)
    if history.exit.status is not None:
        return f"It left with status {history.exit.status}{why}"
    if why != ".":
        return f"It {_text.sentence(how)}" if how.startswith("was ") else f"It died{why}"
    return "It ended without a message: its end was not recorded."


# What it was started with.
Scalar = str | int | float | bool | None
Config = dict[str, Scalar]

_MOST_KEYS = 200
_MOST_DEPTH = 4
_MOST_TEXT = 200


def read_config(layout: RunLayout, attempt: int | None) -> Config:
    """The hyperparameters of an attempt, flat; empty if none were recorded.

    >>> flatten({"lr": 0.1, "model": {"width": 64, "layers": [1, 2]}})
    {'lr': 0.1, 'model.width': 64, 'model.layers': '[1, 2]'}
    """
    if not attempt:
        return {}
    return flatten(record(read_json(layout.start(attempt)).get("config")))


def flatten(config: dict[str, Any], before: str = "", depth: int = _MOST_DEPTH) -> Config:
    """One level: `model.width` for a key in a key. A list is one value, as text."""
    found: Config = {}
    for key, value in config.items():
        path = _text.cut(_text.name(f"{before}{key}"), _MOST_TEXT)
        if isinstance(value, dict) and value and depth > 1:
            found |= flatten(value, f"{path}.", depth - 1)
        else:
            found[path] = _scalar(value)
        if len(found) >= _MOST_KEYS:
            break
    return dict(list(found.items())[:_MOST_KEYS])


def _scalar(value: Any) -> Scalar:
    if value is None or isinstance(value, bool | int | float):
        return value
    shown = value if isinstance(value, str) else json.dumps(value, default=str)
    return _text.cut(_text.name(shown), _MOST_TEXT)
