"""The events of a journal as marks with a title and a text; folded when there are too many."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterable
from operator import itemgetter

from holdfast import _errors, _text
from holdfast._report.json_lines import Record
from holdfast._report.series import Thinned
from holdfast._report.view import Checkpoint, Event, Level
from holdfast._text import real, text, whole

MOST = 4000
_MOST_OF_A_KIND = 2000
_MOST_SNAPSHOTS = 200
MOST_SAMPLES = 2000
_NEWEST_SAMPLES = 200  # that are all kept
_MOST_FIELDS = 6
_MOST_CHARACTERS = 2000
_HIDDEN = ("time", "event", "attempt", "step")
_HAVE_NO_MARK = ("loop", "put-back")
_LEVELS: list[Level] = ["info", "good", "warn", "bad"]

Counted = tuple[Record, int]  # an event, and how many it stands for

# For each event: kind, level, title, and the parts of its text. `{size_bytes:size}` is a field.
# What is in brackets, or a part of the text, is left out if one of its fields is missing.
STRAGGLER = "rank {rank}[ on {host}]: the others wait {seconds:duration} for it in each step"
_PLACE = "[pid {pid}][, on {host}][, job {job}][, ranks: {ranks}]"
_DURABLE = "step {durable_step} is durable"
_EXIT = ("Left with status {status}", "{how}", _DURABLE)
_MEMORY = ("{used:size} of {limit:size}", "full in about {seconds:duration}")
_ASKED = ("by {by}", "{reason}")
_MARKS: dict[str, tuple[str, Level, str, *tuple[str, ...]]] = {
    "start": ("resume", "good", "Attempt {attempt} resumes at step {step}",
              "from {source}", _PLACE),
    "start new": ("start", "info", "Attempt {attempt} starts", _PLACE),
    "start None": ("start", "info", "Attempt {attempt} starts", _PLACE),
    "exit": ("exit", "bad", *_EXIT),
    "exit 0": ("exit", "info", *_EXIT),
    **{f"exit {status}": ("exit", "warn", *_EXIT) for status in _errors.ASKED},
    "death": ("death", "bad", "The trainer {how}", _DURABLE),
    "death left": ("death", "warn", "The trainer {how}", _DURABLE),
    "death None": ("death", "bad", "The trainer died", _DURABLE),
    "thread-died": ("death", "warn", "A thread of the script died", "{type}: {message}"),
    "rank-died": ("death", "bad", "Rank {rank}[ on {host}] died", "{how}"),
    "killed-by-keeper": ("death", "bad", "Ended by its keeper: it did not leave"),
    "survives-kill": ("death", "bad", "Killed, and still there", "pid {pid}"),
    "signal": ("signal", "warn", "{name}", "asks the run to stop"),
    "signal 2": ("signal", "warn", "{name}, the second", "asks the run to stop"),
    "request": ("request", "info", "Asked: {kind}", *_ASKED),
    "request stop": ("request", "warn", "Asked to stop", *_ASKED),
    "request save": ("request", "info", "Asked to save", *_ASKED),
    "request stacks": ("request", "info", "Asked for its stacks", *_ASKED),
    "stop-asked": ("request", "warn", "A rank asks to stop", "{reason}"),
    "stop": ("stop", "warn", "Stops", "{reason}"),
    "end": ("stop", "warn", "The ranks end together", "{reason}"),
    "finished": ("finished", "good", "Trained to its end", "step {step}"),
    "checkpoint": ("checkpoint", "info", "Checkpoint of step {step}",
                   "{reason}", "{size_bytes:size}", "written in {seconds:duration}"),
    "save-failed": ("save-failed", "bad", "A save failed", "{error}"),
    "set-aside": ("set-aside", "warn", "A checkpoint is set aside", "{name}", "{why}"),
    "damaged": ("set-aside", "bad", "A checkpoint is damaged", "{why}"),
    "memory": ("memory", "warn", "The memory of the machine runs out", *_MEMORY),
    "memory cgroup": ("memory", "warn", "The memory of its cgroup runs out", *_MEMORY),
    "memory shm": ("memory", "warn", "The memory of /dev/shm runs out", *_MEMORY),
    "hang": ("hang", "bad", "No step[ for {stood:duration}]", "{sentence}"),
    "hang-over": ("hang", "good", "Makes steps again", "after {seconds:duration}"),
    "slow": ("hang", "info", "A step takes long", "{stood:duration} so far"),
    "paused": ("paused", "warn", "Held by {by}", "it is not called a hang"),
    "paused None": ("paused", "warn", "Held by a debugger", "it is not called a hang"),
    "resumed": ("paused", "info", "Goes on", "after {by}"),
    "rule": ("rule", "bad", "A rule calls the training bad", "{reason}"),
    "rule success": ("rule", "good", "A rule is met", "{reason}"),
    "straggler": ("straggler", "warn", "Rank {rank} holds the others up", STRAGGLER),
    "cadence": ("cadence", "info", "Checkpoints every {seconds:duration}",
                "one costs {cost_seconds:duration}", "it dies every {mtbf_seconds:duration} or so"),
    "job-ends": ("job", "warn", "SLURM ends the job", "{seconds_left:duration} left", "{cause}"),
    "requeue": ("requeue", "info", "SLURM is asked to start it again", "{said}"),
    "keeper-lost": ("keeper", "warn", "A keeper is not heard of", "rank {rank}"),
    "keeper-found": ("keeper", "info", "A keeper is there again", "rank {rank}"),
    "identical-batches": ("data", "warn", "Two ranks see the same data", "{ranks}"),
    "uneven-batches": ("data", "bad", "Ranks have other numbers of batches", "{batches}"),
    "adopted": ("adopted", "info", "Adopted", "from {source}"),
}  # fmt: skip
# The field whose value may choose another mark for an event, such as `exit 0`.
_CHOOSES = {
    **{"start": "source", "exit": "status", "death": "how", "signal": "count", "request": "kind"},
    **{"memory": "what", "paused": "by", "rule": "outcome"},
}
_FIELD = re.compile(r"\{(\w+)(?::(\w+))?\}")
_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")


def describe(event: Record, t: float, attempt: int | None) -> Event | None:
    """The mark for an event of the journal; None if it has none."""
    name = text(event.get("event"), 60)
    if not name or name in _HAVE_NO_MARK:
        return None
    chosen = event.get(_CHOOSES.get(name, ""))
    known = _MARKS.get(f"{name} {None if chosen == '' else chosen}") or _MARKS.get(name)
    if known is not None:
        kind, level, title, *parts = known
        more = "; ".join(fill(each, event) for each in parts if _has_all(each, event))
    else:  # an event of a later version or of a logger
        kind, level, title = name, "info", name.replace("-", " ").capitalize()
        fields = [(key, value) for key, value in event.items() if key not in _HIDDEN]
        shown = (f"{key} {value}" for key, value in fields[:_MOST_FIELDS] if value is not None)
        more = text(", ".join(shown), 300)
    return Event(
        t=t,
        kind=kind,
        attempt=attempt,
        step=whole(event.get("step")),
        level=level,
        title=_text.cut(fill(title, event), _MOST_CHARACTERS),
        text=_text.cut(more, _MOST_CHARACTERS),
    )


def fill(template: str, event: Record) -> str:
    """Put the fields of an event into a text.

    >>> fill("rank {rank}[ on {host}]", {"rank": 3}), fill("{s:duration}", {"s": 90})
    ('rank 3', '90 s')
    """
    pieces = _OPTIONAL.split(template)  # every other one was in brackets
    kept = (each for at, each in enumerate(pieces) if not at % 2 or _has_all(each, event))
    return _FIELD.sub(lambda field: _value(field, event) or "?", "".join(kept))


def _has_all(template: str, event: Record) -> bool:
    return all(_value(field, event) for field in _FIELD.finditer(_OPTIONAL.sub("", template)))


def _value(field: re.Match[str], event: Record) -> str:
    value = event.get(field[1])
    if isinstance(value, str | list):
        return "" if field[2] else str(value or "")
    if (number := real(value)) is None:
        return ""
    if field[2]:
        return _text.size(number) if field[2] == "size" else _text.duration(number)
    return str(value)


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
        # Snapshots come every other second.
        most = _MOST_SNAPSHOTS if event["kind"] == "snapshot" else _MOST_OF_A_KIND
        if len(found) > 2 * most:
            self._of[event["kind"]] = fold(found)

    def all(self, more: Iterable[list[Event]] = ()) -> list[Event]:
        """Oldest first; beyond `MOST` the most frequent kinds are folded."""
        kinds = [*(list(each) for each in self._of.values()), *more]
        while sum(map(len, kinds)) > MOST:
            longest = max(kinds, key=len)
            kinds.remove(longest)
            kinds.append(fold(longest))
        return sorted(itertools.chain(*kinds), key=itemgetter("t", "kind"))


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
