"""Events that come by the hundred thousand, as checkpoints do: only samples are parsed."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast._report import events
from holdfast._report.json_lines import Record, parse_lines
from holdfast._report.view import Checkpoint, Event
from holdfast._text import real, text, whole

MOST = 2000
_NEWEST = 200  # that are all kept
_BULK_BYTES = 1 << 18
_TAIL_BYTES = 1 << 16
_SAMPLES = 100  # of each kind, in a piece
# As the journal writes them. A line of another form is read like any other event.
_OWN = (
    rb'\{"time": [0-9.]+, "event": "(?:checkpoint"|(?P<request>request", '
    rb'(?:"attempt": [0-9]+, )?"kind": "save"))[^\n]*\n'
)
_LINE = re.compile(rb"^" + _OWN, re.MULTILINE)
_RUN = re.compile(rb"^(?:" + _OWN.replace(b"?P<request>", b"?:") + rb")+", re.MULTILINE)

Counted = tuple[Record, int]  # an event, and how many it stands for


class Many:
    """Lines of one kind: some of them, evenly spread, and the newest."""

    def __init__(self, mark: bytes) -> None:
        self.mark = mark  # a text that only such lines have
        self._early: list[tuple[bytes, int]] = []  # each with how many it stands for
        self._newest: list[bytes] = []
        self._stride = 1
        self._parsed: dict[bytes, Record] = {}
        self._known: list[Counted] | None = None
        self._marks: tuple[int | None, list[Event]] | None = None

    def add(self, lines: list[bytes]) -> None:
        self._newest += lines
        self._make_room()

    def add_some(self, piece: bytes) -> None:
        """From very many lines take samples of this kind, evenly spread, and the last ones."""
        count = piece.count(self.mark)
        if not count:
            return
        head, tail = piece[:-_TAIL_BYTES], piece[-_TAIL_BYTES:]
        last = [line for line in tail[tail.find(b"\n") + 1 :].split(b"\n") if self.mark in line]
        samples: dict[bytes, None] = {}
        for number in range(_SAMPLES):
            at = head.find(self.mark, number * len(head) // _SAMPLES)
            if at >= 0:
                samples[piece[piece.rfind(b"\n", 0, at) + 1 : piece.find(b"\n", at)]] = None
        for line in self._newest:
            self._keep(line, 1)
        share, rest = divmod(max(0, count - len(last)), max(1, len(samples)))
        for at, line in enumerate(samples):
            self._keep(line, share + (at < rest))
        self._newest = last
        self._make_room()

    def _make_room(self) -> None:
        self._known = self._marks = None
        if len(self._newest) > 2 * _NEWEST:
            for line in self._newest[:-_NEWEST]:
                self._keep(line, 1)
            del self._newest[:-_NEWEST]

    def _keep(self, line: bytes, count: int) -> None:
        """Neighbours share a place."""
        if self._early and self._early[-1][1] + count <= self._stride:
            self._early[-1] = (self._early[-1][0], self._early[-1][1] + count)
            return
        self._early.append((line, count))
        while len(self._early) > MOST - 2 * _NEWEST:
            old, self._early = self._early, []
            self._stride *= 2
            for each in old:
                self._keep(*each)

    def events(self) -> list[Counted]:
        """The kept ones, oldest first."""
        if self._known is None:
            before, self._parsed = self._parsed, {}
            self._known = []
            for line, count in (*self._early, *((line, 1) for line in self._newest)):
                if (event := before.get(line)) is None:
                    event = next(iter(parse_lines([line])), {})
                self._parsed[line] = event
                if event:
                    self._known.append((event, count))
        return self._known

    def marks(self, attempt: int | None = None) -> list[Event]:
        """As marks of the timeline; `attempt` is for events that do not name theirs."""
        if self._marks is None or self._marks[0] != attempt:
            self._marks = (attempt, list(_marks(self.events(), attempt)))
        return self._marks[1]


class Frequent:
    """The events of which there are so many."""

    def __init__(self) -> None:
        self.checkpoints = Many(b'"event": "checkpoint"')
        self.requests = Many(b'"kind": "save"')

    def sort_out(self, piece: bytes) -> bytes:
        """Take these events out of a piece of the journal; returns the rest."""
        if len(piece) >= _BULK_BYTES:
            self.checkpoints.add_some(piece)
            self.requests.add_some(piece)
        else:
            for found in _LINE.finditer(piece):
                kind = self.requests if found["request"] else self.checkpoints
                kind.add([found[0][:-1]])
        return _RUN.sub(b"", piece)


def checkpoints(counted: list[Counted], kept: set[str]) -> list[Checkpoint]:
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


def _marks(counted: list[Counted], attempt: int | None) -> Iterator[Event]:
    for event, count in counted:
        t = real(event.get("time"))
        of = whole(event.get("attempt"))
        mark = None if t is None else events.describe(event, t, attempt if of is None else of)
        if mark is not None:
            if count > 1:
                mark["count"] = count
            yield mark
