"""Goodput: the share of the time that made progress, and where the rest went.

The whole time of a run is tiled by segments of one kind each, without gap or overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from holdfast import _errors, _text
from holdfast._report.attempts import AttemptHistory, Point, at_step, by_record
from holdfast._report.view import Goodput, GoodputPart, PartKind, Segment, SegmentKind

MOST = 4000


class Layer(NamedTuple):
    """A stretch of time; later layers of a list cover earlier ones."""

    kind: SegmentKind
    start: float
    end: float
    text: str = ""


@dataclass(frozen=True)
class SpreadSeconds:
    """Seconds that are spread over many steps, without a segment of their own."""

    save: float = 0.0
    agree: float = 0.0


def paint(start: float, end: float, layers: Sequence[Layer]) -> list[Layer]:
    """Cut [start, end] so that at each moment the last layer that is there shows.

    The first layer is the ground, and reaches everywhere.
    """
    if not end > start:
        return []
    begins: list[tuple[float, int]] = []
    for number, layer in enumerate(layers):
        low = start if number == 0 else max(start, layer.start)
        high = end if number == 0 else min(end, layer.end)
        if high > low:
            begins.append((low, number))
    begins.sort()
    inner = (layer.end for layer in layers[1:] if start < layer.end < end)
    moments = sorted({start, end, *(t for t, _ in begins), *inner})
    found: list[Layer] = []
    active: list[int] = []  # numbers, the greatest first
    at = 0
    for low, high in itertools.pairwise(moments):
        while at < len(begins) and begins[at][0] <= low:
            heappush(active, -begins[at][1])
            at += 1
        while -active[0] and layers[-active[0]].end <= low:
            heappop(active)
        top = layers[-active[0]]
        if found and found[-1].kind == top.kind and found[-1].text == top.text:
            found[-1] = found[-1]._replace(end=high)
        else:
            found.append(Layer(top.kind, low, high, top.text))
    return found


def tile(
    histories: Sequence[AttemptHistory],
    cuts: Mapping[int, int | None],
    now: float,
    live: int | None,
) -> tuple[list[Segment], SpreadSeconds]:
    """All segments, and the seconds spread over them.

    `cuts` has for each attempt the step after which its work was repeated, None if none was. An
    attempt without an entry is not in the lineage: all of it was repeated.
    """
    spans = _spans(histories, now, live)
    found: list[Segment] = []
    save = agree = 0.0
    for at, (history, (start, end)) in enumerate(zip(histories, spans, strict=True)):
        if at:
            found += _gap(histories[at - 1], history, spans[at - 1][1], start)
        course = history.timeline.steps()
        cut = _cut(history, course, cuts)
        layers = _layers(history, start, cut, is_live=history.number == live)
        for kind, low, high, text in paint(start, end, layers):
            found.append(Segment(kind=kind, start=low, end=high, attempt=history.number))
            if text:
                found[-1]["text"] = text
        upto = cut or (course[-1] if course else Point(0.0, 0))
        save, agree = save + upto.save, agree + upto.agree
    return _joined(found), SpreadSeconds(save, agree)


def _spans(
    histories: Sequence[AttemptHistory], now: float, live: int | None
) -> list[tuple[float, float]]:
    """Start and end of each attempt, without overlap, even if clocks differ."""
    starts: list[float] = []
    for history in histories:
        known = [
            history.began,
            history.started,
            *(each.t for each in history.timeline.points[:1]),
            history.last_seen,
        ]
        begin = next((each for each in known if each is not None), None)
        least = starts[-1] if starts else float("-inf")
        starts.append(max(least, begin if begin is not None else (starts[-1] if starts else now)))
    found = []
    for at, history in enumerate(histories):
        last = now if history.number == live else history.ended or history.last_seen
        end = max(starts[at], starts[at] if last is None else last)
        if at + 1 < len(starts):
            end = min(end, starts[at + 1])
        found.append((starts[at], end))
    return found


def _cut(
    history: AttemptHistory, course: list[Point], cuts: Mapping[int, int | None]
) -> Point | None:
    """From where on its work was lost; None if none was."""
    if not course:
        return None
    step = cuts.get(history.number, course[0].step)
    if step is None or (history.last_step or 0) <= step:
        return None
    return at_step(course, step)


def _layers(
    history: AttemptHistory, start: float, cut: Point | None, *, is_live: bool
) -> list[Layer]:
    opened, over = history.started, float("inf")
    layers = [Layer("training", start, over)]
    layers += (Layer("phase", each.start, each.end, each.what) for each in history.timeline.phases)
    layers += (Layer("saving", each.start, each.end) for each in history.timeline.saves)
    if cut is not None:
        layers.append(Layer("lost", cut.t, over))
    layers += (Layer("stuck", each.start, each.end, each.what) for each in history.timeline.stuck)
    layers += (Layer("paused", each.start, each.end, each.what) for each in history.timeline.paused)
    if opened is None or (history.last_step or 0) <= (history.first_step or 0):
        layers.append(Layer("starting", start, over))
    elif (begins := max(opened, history.looped or opened)) > start:
        layers.append(Layer("starting", start, begins))
    leaves = history.left_loop
    if leaves is None and not is_live:
        leaves = history.died_at  # from then on its keeper saved its last state
    if opened is not None and leaves is not None:
        layers.append(Layer("leaving", leaves, over))
    return layers


def _gap(before: AttemptHistory, after: AttemptHistory, start: float, end: float) -> list[Segment]:
    if not end > start:
        return []
    began = after.process.job_started
    outcome = by_record(before, is_live=False)
    kind: SegmentKind = "down"
    # A hangup stops nothing on purpose: the connection to the terminal may have been lost.
    if outcome in ("finished", "closed", "stopped") and before.exit.status != _errors.HUNG_UP:
        kind = "stopped"
    elif after.process.job is not None and began is not None and start < began < end:
        return [
            Segment(kind="queue", start=start, end=began, attempt=None),
            Segment(kind="starting", start=began, end=end, attempt=after.number),
        ]
    elif after.process.job is not None:
        # Both the same job and another one come through the queue.
        comes_by_queue = before.process.job is not None or before.is_requeued
        if comes_by_queue if began is None else began >= end:
            kind = "queue"
    return [Segment(kind=kind, start=start, end=end, attempt=None)]


def _joined(segments: list[Segment]) -> list[Segment]:
    """Merge neighbours of one kind and one attempt."""
    found: list[Segment] = []
    for each in segments:
        last = found[-1] if found else None
        keys = ("kind", "attempt", "text")
        if last is not None and all(last.get(key) == each.get(key) for key in keys):
            found[-1] = {**last, "end": each["end"]}
        else:
            found.append(each)
    return found


def simplify(segments: list[Segment], most: int = MOST) -> list[Segment]:
    """Few enough to be drawn: segments too short to be seen are added to their neighbours."""
    while len(segments) > most:
        lengths = sorted(each["end"] - each["start"] for each in segments)
        bar = lengths[len(segments) - most]
        found: list[Segment] = []
        for each in segments:
            if found and each["end"] - each["start"] <= bar:
                found[-1] = {**found[-1], "end": each["end"]}
            else:
                found.append(each)
        found = _joined(found)
        if len(found) == len(segments):
            break
        segments = found
    return segments


PROGRESS: tuple[PartKind, ...] = ("progress", "phase")
_LABELS: dict[PartKind, str] = {
    "progress": "training",
    "phase": "evaluation and other phases",
    "saving": "saving",
    "waiting": "waiting for other ranks",
    "lost": "repeated work",
    "starting": "starting",
    "leaving": "leaving",
    "stuck": "standing still",
    "paused": "held by a debugger or a signal",
    "queue": "waiting for the queue",
    "down": "down",
    "stopped": "stopped on purpose",
}
_NEUTRAL: tuple[PartKind, ...] = (*PROGRESS, "stopped")  # neither is lost
_MOST_NAMED = 4
_LEAST_SHARE = 0.01  # of what was lost, to be named


def account(segments: Sequence[Segment], held: SpreadSeconds) -> Goodput:
    """The parts of the wall time, which sum to it."""
    seconds: dict[PartKind, float] = dict.fromkeys(_LABELS, 0.0)
    for each in segments:
        kind: PartKind = "progress" if each["kind"] == "training" else each["kind"]
        seconds[kind] += each["end"] - each["start"]
    # Seconds spread over steps were drawn as training, and cannot exceed it.
    spread: dict[PartKind, float] = {"saving": held.save, "waiting": held.agree}
    for kind, wanted in spread.items():
        taken = min(max(0.0, wanted), seconds["progress"])
        seconds["progress"] -= taken
        seconds[kind] += taken
    wall = sum(seconds.values())
    progress, stopped = sum(seconds[kind] for kind in PROGRESS), seconds["stopped"]
    parts = [
        GoodputPart(kind=kind, seconds=each, share=each / wall, label=_label(kind, segments))
        for kind, each in seconds.items()
        if each > 0
    ]
    return Goodput(
        wall_seconds=wall,
        progress_seconds=progress,
        stopped_seconds=stopped,
        share=progress / (wall - stopped) if wall > stopped else 0.0,
        parts=parts,
        sentence=_sentence(parts, wall - stopped - progress),
    )


def _label(kind: PartKind, segments: Sequence[Segment]) -> str:
    if kind != "lost":
        return _LABELS[kind]
    newest = max(each["attempt"] or 0 for each in segments)
    lost = {each["attempt"] for each in segments if each["kind"] == "lost"}
    # What the newest attempt lost has not been repeated yet.
    return "work to be made again" if lost == {newest} else _LABELS[kind]


def _sentence(parts: Sequence[GoodputPart], lost: float) -> str:
    if not parts:
        return "no time has passed yet"
    if lost < 0.001:
        return "nothing lost"
    found = [each for each in parts if each["kind"] not in _NEUTRAL]
    found.sort(key=lambda each: -each["seconds"])
    named = [each for each in found if each["seconds"] >= _LEAST_SHARE * lost][:_MOST_NAMED]
    told = [f"{100 * each['seconds'] / lost:.0f}% {each['label']}" for each in named]
    rest = lost - sum(each["seconds"] for each in named)
    if rest >= _LEAST_SHARE * lost:
        told.append(f"{100 * rest / lost:.0f}% other")
    return f"lost {_text.duration(lost)}: {', '.join(told)}"
