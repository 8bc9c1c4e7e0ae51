"""The events of a journal as marks with a title and a text; folded when there are too many."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from heapq import merge

from holdfast import _errors, _text
from holdfast._report.json_lines import Record
from holdfast._report.series import Thinned
from holdfast._report.view import Checkpoint, Event, Level
from holdfast._text import real, text, whole

MOST = 4000
_MOST_OF_A_KIND = 2000
MOST_SAMPLES = 2000
_NEWEST_SAMPLES = 200  # that are all kept
_MOST_FIELDS = 6
_MOST_CHARACTERS = 2000
_HIDDEN = ("time", "event", "attempt", "step")
_HAVE_NO_MARK = ("loop", "put-back")

Described = tuple[str, Level, str, str]  # kind, level, title, text
Counted = tuple[Record, int]  # an event, and how many it stands for


def describe(event: Record, t: float, attempt: int | None) -> Event | None:
    """The mark for an event of the journal; None if it has none."""
    name = text(event.get("event"), 60)
    if not name or name in _HAVE_NO_MARK:
        return None
    known = _BY_NAME.get(name)
    kind, level, title, more = _unknown(name, event) if known is None else known(event)
    return Event(
        t=t,
        kind=kind,
        attempt=attempt,
        step=whole(event.get("step")),
        level=level,
        title=_text.cut(title, _MOST_CHARACTERS),
        text=_text.cut(more, _MOST_CHARACTERS),
    )


class SampledEvents(Thinned[Counted]):
    """Events that come by the hundred thousand, as checkpoints do.

    Of very many only samples are kept, evenly spread, and the newest ones.
    """

    def __init__(self) -> None:
        super().__init__(MOST_SAMPLES - _NEWEST_SAMPLES)
        self._newest: deque[Counted] = deque()

    def add(self, event: Record) -> None:
        self._newest.append((event, 1))
        if len(self._newest) > _NEWEST_SAMPLES:
            self.put(self._newest.popleft())

    def merge(self, first: Counted, second: Counted) -> Counted:
        return first[0], first[1] + second[1]

    def events(self) -> list[Counted]:
        """The kept ones, oldest first."""
        return [*self.points, *self._newest]

    def marks(self) -> list[Event]:
        found: list[Event] = []
        for event, count in self.events():
            t = real(event.get("time"))
            mark = None if t is None else describe(event, t, whole(event.get("attempt")))
            if mark is not None:
                found.append({**mark, "count": count} if count > 1 else mark)
        return found


class EventMarks:
    """All events so far, at most some thousand."""

    def __init__(self) -> None:
        self._of: dict[str, list[Event]] = {}

    def add(self, event: Event) -> None:
        found = self._of.setdefault(event["kind"], [])
        found.append(event)
        if len(found) > 2 * _MOST_OF_A_KIND:
            self._of[event["kind"]] = fold(found)

    def all(self, more: Iterable[list[Event]] = ()) -> list[Event]:
        """Oldest first; beyond `MOST` the most frequent kinds are folded."""
        kinds = [*(list(each) for each in self._of.values()), *more]
        while sum(map(len, kinds)) > MOST:
            longest = max(kinds, key=len)
            kinds.remove(longest)
            kinds.append(fold(longest))
        ordered = [sorted(each, key=_moment) for each in kinds]
        return list(merge(*ordered, key=_moment))


def list_checkpoints(counted: list[Counted], kept: set[str]) -> list[Checkpoint]:
    """For the page; `kept` has the names of those on disk."""
    found = []
    for event, _ in counted:
        t, step = real(event.get("time")), whole(event.get("step"))
        if t is None or step is None:
            continue
        size = whole(event.get("size_bytes"))
        written = whole(event.get("written_bytes"))
        name = text(event.get("name"), 200)
        found.append(
            Checkpoint(
                t=t,
                step=step,
                attempt=whole(event.get("attempt")),
                size_bytes=size,
                written_bytes=size if written is None else written,
                seconds=real(event.get("seconds")),
                reason=text(event.get("reason"), 300),
                name=name,
                is_kept=name in kept,
            )
        )
    return found


def fold(events: list[Event]) -> list[Event]:
    """Merge each two neighbours into one with their count; the last stays as it is."""
    found = [
        _both(events[at], events[at + 1]) if at + 1 < len(events) - 1 else events[at]
        for at in range(0, len(events) - 1, 2)
    ]
    return [*found, events[-1]] if events else []


def _both(first: Event, second: Event) -> Event:
    count = first.get("count", 1) + second.get("count", 1)
    until = max(second.get("until", second["t"]), first.get("until", first["t"]))
    worse = max(first, second, key=lambda each: _LEVELS.index(each["level"]))
    return {**worse, "t": min(first["t"], second["t"]), "count": count, "until": until}


_LEVELS: list[Level] = ["info", "good", "warn", "bad"]


def _moment(event: Event) -> float:
    return event["t"]


def _unknown(name: str, event: Record) -> Described:
    """An event of a later version or of a logger."""
    known = [(key, value) for key, value in event.items() if key not in _HIDDEN]
    shown = ", ".join(f"{key} {value}" for key, value in known[:_MOST_FIELDS] if value is not None)
    return name, "info", name.replace("-", " ").capitalize(), text(shown, 300)


def _start(event: Record) -> Described:
    attempt, step, source = event.get("attempt"), event.get("step"), text(event.get("source"))
    where = ", ".join(
        f"{what} {event[key]}"
        for key, what in (("pid", "pid"), ("host", "on"), ("job", "job"), ("ranks", "ranks:"))
        if isinstance(event.get(key), str | int)
    )
    if source in ("", "new"):
        return "start", "info", f"Attempt {attempt} starts", where
    text_ = f"from {source}; {where}" if where else f"from {source}"
    return "resume", "good", f"Attempt {attempt} resumes at step {step}", text_


def _exit(event: Record) -> Described:
    status, how = whole(event.get("status")), text(event.get("how"))
    said = "" if how == "closed" else how
    level: Level = "info" if status == 0 else "warn" if status in _errors.ASKED else "bad"
    return "exit", level, f"Left with status {status}", _and(said, _durable(event))


def _death(event: Record) -> Described:
    how = text(event.get("how")) or "died"
    level: Level = "warn" if how == "left" else "bad"
    return "death", level, f"The trainer {how}", _durable(event)


def _rank_died(event: Record) -> Described:
    host = text(event.get("host"), 100)
    where = f" on {host}" if host else ""
    return "death", "bad", f"Rank {event.get('rank')}{where} died", text(event.get("how"))


def _signal(event: Record) -> Described:
    name = text(event.get("name"), 40) or "a signal"
    again = ", the second" if event.get("count") == 2 else ""
    return "signal", "warn", f"{name}{again}", "asks the run to stop"


def _request(event: Record) -> Described:
    what = text(event.get("kind"), 40)
    titles = {"stop": "Asked to stop", "save": "Asked to save", "stacks": "Asked for its stacks"}
    by = f"by {event['by']}" if isinstance(event.get("by"), str) else ""
    level: Level = "warn" if what == "stop" else "info"
    return "request", level, titles.get(what, f"Asked: {what}"), _and(by, text(event.get("reason")))


def _checkpoint(event: Record) -> Described:
    size, seconds = real(event.get("size_bytes")), real(event.get("seconds"))
    figures = [text(event.get("reason"), 200)]
    figures += [_text.size(size)] if size is not None else []
    figures += [f"written in {_text.duration(seconds)}"] if seconds is not None else []
    return "checkpoint", "info", f"Checkpoint of step {event.get('step')}", _and(*figures)


def _memory(event: Record) -> Described:
    used, limit, left = (real(event.get(key)) for key in ("used", "limit", "seconds"))
    what = {"cgroup": "its cgroup", "shm": "/dev/shm"}.get(text(event.get("what")), "the machine")
    figures = f"{_text.size(used)} of {_text.size(limit)}" if used and limit else ""
    soon = "" if left is None else f"full in about {_text.duration(left)}"
    return "memory", "warn", f"The memory of {what} runs out", _and(figures, soon)


def _hang(event: Record) -> Described:
    stood = real(event.get("stood"))
    standing = "" if stood is None else f" for {_text.duration(stood)}"
    return "hang", "bad", f"No step{standing}", text(event.get("sentence"))


def _rule(event: Record) -> Described:
    is_good = event.get("outcome") == "success"
    title = "A rule is met" if is_good else "A rule calls the training bad"
    return "rule", "good" if is_good else "bad", title, text(event.get("reason"))


def _straggler(event: Record) -> Described:
    return "straggler", "warn", f"Rank {event.get('rank')} holds the others up", straggler(event)


def straggler(event: Record) -> str:
    host, seconds = text(event.get("host"), 100), real(event.get("seconds")) or 0.0
    where = f" on {host}" if host else ""
    wait = _text.duration(seconds)
    return f"rank {event.get('rank')}{where}: the others wait {wait} for it in each step"


def _paused(event: Record) -> Described:
    by = text(event.get("by"), 200) or "a debugger"
    return "paused", "warn", f"Held by {by}", "it is not called a hang"


def _simple(
    kind: str, level: Level, title: str, *keys: str, before: str = ""
) -> Callable[[Record], Described]:
    def describe_fields(event: Record) -> Described:
        found = [str(event[key]) for key in keys if event.get(key) not in (None, "")]
        return kind, level, title, before + ", ".join(found) if found else ""

    return describe_fields


def _cadence(event: Record) -> Described:
    every, cost, mtbf = (real(event.get(f"{each}seconds")) for each in ("", "cost_", "mtbf_"))
    title = "The time between checkpoints"
    if every is not None:
        title = f"Checkpoints every {_text.duration(every)}"
    costs = "" if cost is None else f"one costs {_text.duration(cost)}"
    dies = "" if mtbf is None else f"it dies every {_text.duration(mtbf)} or so"
    return "cadence", "info", title, _and(costs, dies)


def _job_ends(event: Record) -> Described:
    left = real(event.get("seconds_left"))
    more = text(event.get("cause")) if left is None else f"{_text.duration(left)} left"
    return "job", "warn", "SLURM ends the job", more


def _durable(event: Record) -> str:
    step = whole(event.get("durable_step"))
    return "" if step is None else f"step {step} is durable"


def _and(*parts: str) -> str:
    return "; ".join(filter(None, parts))


_BY_NAME: dict[str, Callable[[Record], Described]] = {
    "start": _start,
    "exit": _exit,
    "death": _death,
    "rank-died": _rank_died,
    "signal": _signal,
    "request": _request,
    "checkpoint": _checkpoint,
    "memory": _memory,
    "hang": _hang,
    "rule": _rule,
    "straggler": _straggler,
    "paused": _paused,
    "job-ends": _job_ends,
    "cadence": _cadence,
    "stop": _simple("stop", "warn", "Stops", "reason"),
    "stop-asked": _simple("request", "warn", "A rank asks to stop", "reason"),
    "end": _simple("stop", "warn", "The ranks end together", "reason"),
    "finished": _simple("finished", "good", "Trained to its end", "step", before="step "),
    "save-failed": _simple("save-failed", "bad", "A save failed", "error"),
    "killed-by-keeper": _simple("death", "bad", "Ended by its keeper: it did not leave"),
    "survives-kill": _simple("death", "bad", "Killed, and still there", "pid", before="pid "),
    "hang-over": _simple("hang", "good", "Makes steps again", "seconds", before="after, in s: "),
    "slow": _simple("hang", "info", "A step takes long", "stood", before="so far, in s: "),
    "resumed": _simple("paused", "info", "Goes on", "by", before="after "),
    "requeue": _simple("requeue", "info", "SLURM is asked to start it again", "said"),
    "keeper-lost": _simple("keeper", "warn", "A keeper is not heard of", "rank", before="rank "),
    "keeper-found": _simple("keeper", "info", "A keeper is there again", "rank", before="rank "),
    "identical-batches": _simple("data", "warn", "Two ranks see the same data", "ranks"),
    "uneven-batches": _simple("data", "bad", "Ranks have other numbers of batches", "batches"),
    "set-aside": _simple("set-aside", "warn", "A checkpoint is set aside", "name", "why"),
    "damaged": _simple("set-aside", "bad", "A checkpoint is damaged", "why"),
    "adopted": _simple("adopted", "info", "Adopted", "source", before="from "),
}
