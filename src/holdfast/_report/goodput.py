"""Goodput: the share of the time that made progress, and where the rest went."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from holdfast import _text
from holdfast._report.attempts import Life, Point, at_step
from holdfast._report.view import Goodput, Part, PartKind, Segment, SegmentKind

# -- The whole time of a run, cut into stretches of one kind each, without gap or overlap ----------


MOST = 4000


class Layer(NamedTuple):
    """What was going on from here to there; what comes later in a list covers what is before."""

    kind: SegmentKind
    start: float
    end: float
    text: str = ""


@dataclass(frozen=True)
class Held:
    """Seconds that are spread over many steps, and stand in no segment of their own."""

    save: float = 0.0
    agree: float = 0.0
    phase: float = 0.0


def paint(start: float, end: float, layers: Sequence[Layer]) -> list[Layer]:
    """Cut [start, end] so that everywhere the last layer is seen that is there.

    The first layer is the ground, and is taken to reach everywhere.
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
    moments = sorted({start, end, *(t for t, _ in begins), *_inner(start, end, layers)})
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


def _inner(start: float, end: float, layers: Sequence[Layer]) -> Iterable[float]:
    return (layer.end for layer in layers[1:] if start < layer.end < end)


def tile(
    lives: Sequence[Life], cuts: Mapping[int, int | None], now: float, live: int | None
) -> tuple[list[Segment], Held]:
    """All segments, and what is spread over them.

    `cuts` has for each attempt the step after which its work was made again, None if none was.
    An attempt without an entry was left for another history: all of it was.
    """
    spans = _spans(lives, now, live)
    found: list[Segment] = []
    save = agree = phase = 0.0
    for at, (life, (start, end)) in enumerate(zip(lives, spans, strict=True)):
        if at:
            found += _gap(lives[at - 1], life, spans[at - 1][1], start)
        course = life.course()
        cut = _cut(life, course, cuts)
        for layer in paint(start, end, _layers(life, start, cut, is_live=life.number == live)):
            found.append(_segment(layer, life.number))
        last = course[-1] if course else Point(0.0, 0)
        upto = cut or last
        save, agree = save + upto.save, agree + upto.agree
        if life.undrawn_phase_seconds and last.rest:
            phase += life.undrawn_phase_seconds * upto.rest / last.rest
    return _joined(found), Held(save, agree, phase)


def _spans(lives: Sequence[Life], now: float, live: int | None) -> list[tuple[float, float]]:
    """From when to when each was there: one after the other, though clocks may say otherwise."""
    starts: list[float] = []
    for life in lives:
        known = [life.began, life.started, *(each.t for each in life.points[:1]), life.last_seen]
        begin = next((each for each in known if each is not None), None)
        least = starts[-1] if starts else float("-inf")
        starts.append(max(least, begin if begin is not None else (starts[-1] if starts else now)))
    found = []
    for at, life in enumerate(lives):
        last = now if life.number == live else life.ended or life.last_seen
        end = max(starts[at], starts[at] if last is None else last)
        if at + 1 < len(starts):
            end = min(end, starts[at + 1])
        found.append((starts[at], end))
    return found


def _cut(life: Life, course: list[Point], cuts: Mapping[int, int | None]) -> Point | None:
    """From where on its work was lost."""
    if not course:
        return None
    step = cuts.get(life.number, course[0].step)
    if step is None or (life.last_step or 0) <= step:
        return None
    return at_step(course, step)


def _layers(life: Life, start: float, cut: Point | None, *, is_live: bool) -> list[Layer]:
    """From the ground up."""
    opened, over = life.started, float("inf")
    layers = [Layer("training", start, over)]
    layers += (Layer("phase", each.start, each.end, each.what) for each in life.phases)
    layers += (Layer("saving", each.start, each.end) for each in life.saves)
    if cut is not None:
        layers.append(Layer("lost", cut.t, over))
    layers += (Layer("stuck", each.start, each.end, each.what) for each in life.stuck)
    layers += (Layer("paused", each.start, each.end, each.what) for each in life.paused)
    if opened is None or not life.has_stepped:
        layers.append(Layer("starting", start, over))
    elif (begins := max(opened, life.looped or opened)) > start:
        layers.append(Layer("starting", start, begins))
    leaves = None if opened is None else life.left_loop if is_live else _leaves_at(life)
    if leaves is not None:
        layers.append(Layer("leaving", leaves, over))
    return layers


def _leaves_at(life: Life) -> float | None:
    if life.left_loop is not None:
        return life.left_loop
    # It died: from then on its keeper saved what it had left.
    return life.died_at


def _gap(before: Life, after: Life, start: float, end: float) -> list[Segment]:
    if not end > start:
        return []
    if after.job is None:
        return [Segment(kind="down", start=start, end=end, attempt=None)]
    began = after.job_started
    if began is None or began >= end or began <= start:
        # The same job comes back only through the queue, and another one has come from there.
        is_queue = began is None and (before.job is not None or before.is_requeued)
        is_queue = is_queue or (began is not None and began >= end)
        kind: SegmentKind = "queue" if is_queue else "down"
        return [Segment(kind=kind, start=start, end=end, attempt=None)]
    return [
        Segment(kind="queue", start=start, end=began, attempt=None),
        Segment(kind="starting", start=began, end=end, attempt=after.number),
    ]


def _segment(layer: Layer, attempt: int) -> Segment:
    found = Segment(kind=layer.kind, start=layer.start, end=layer.end, attempt=attempt)
    if layer.text:
        found["text"] = layer.text
    return found


def _joined(segments: list[Segment]) -> list[Segment]:
    """Two neighbours of one kind and one attempt are one."""
    found: list[Segment] = []
    for each in segments:
        last = found[-1] if found else None
        if last is not None and _same(last, each):
            found[-1] = {**last, "end": each["end"]}
        else:
            found.append(each)
    return found


def _same(first: Segment, second: Segment) -> bool:
    keys = ("kind", "attempt", "text")
    return all(first.get(key) == second.get(key) for key in keys)


def simplify(segments: list[Segment], most: int = MOST) -> list[Segment]:
    """Few enough to be drawn: what is too short to be seen goes to its neighbour."""
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
}
_MOST_NAMED = 4
_CRUMB_SHARE = 2e-4  # of the whole time
_LEAST_SHARE = 0.01  # of what was lost, to be named


def account(segments: Sequence[Segment], held: Held) -> Goodput:
    """The parts of the whole time, which sum to it."""
    seconds: dict[PartKind, float] = dict.fromkeys(_LABELS, 0.0)
    for each in segments:
        kind: PartKind = "progress" if each["kind"] == "training" else each["kind"]
        seconds[kind] += each["end"] - each["start"]
    # What is spread over steps was drawn as training, and cannot be more than that.
    spread: tuple[tuple[PartKind, float], ...] = (
        ("phase", held.phase),
        ("saving", held.save),
        ("waiting", held.agree),
    )
    for kind, wanted in spread:
        taken = min(max(0.0, wanted), seconds["progress"])
        seconds["progress"] -= taken
        seconds[kind] += taken
    _fold_crumbs(seconds)
    wall = sum(seconds.values())
    progress = sum(seconds[kind] for kind in PROGRESS)
    parts = [
        Part(kind=kind, seconds=each, share=each / wall, label=_label(kind, segments))
        for kind, each in seconds.items()
        if each > 0
    ]
    return Goodput(
        wall_seconds=wall,
        progress_seconds=progress,
        share=progress / wall if wall else 0.0,
        parts=parts,
        sentence=_sentence(parts, wall - progress),
    )


def _fold_crumbs(seconds: dict[PartKind, float]) -> None:
    """What nobody could see goes to the greatest loss."""
    wall = sum(seconds.values())
    lost = [kind for kind in seconds if kind not in PROGRESS and seconds[kind] > 0]
    greatest = max(lost, key=lambda kind: seconds[kind], default=None)
    for kind in lost:
        if kind != greatest and seconds[kind] < _CRUMB_SHARE * wall and greatest is not None:
            seconds[greatest] += seconds[kind]
            seconds[kind] = 0.0


def _label(kind: PartKind, segments: Sequence[Segment]) -> str:
    if kind != "lost":
        return _LABELS[kind]
    newest = max(each["attempt"] or 0 for each in segments)
    lost = {each["attempt"] for each in segments if each["kind"] == "lost"}
    # What the newest attempt lost nobody has made again so far.
    return "work to be made again" if lost == {newest} else _LABELS[kind]


def _sentence(parts: Sequence[Part], lost: float) -> str:
    """What was lost, with the greatest causes first."""
    if not parts:
        return "no time has passed yet"
    if lost < 0.001:
        return "nothing lost"
    found = [each for each in parts if each["kind"] not in PROGRESS]
    found.sort(key=lambda each: -each["seconds"])
    named = [each for each in found if each["seconds"] >= _LEAST_SHARE * lost][:_MOST_NAMED]
    told = [f"{100 * each['seconds'] / lost:.0f}% {each['label']}" for each in named]
    rest = lost - sum(each["seconds"] for each in named)
    if rest >= _LEAST_SHARE * lost:
        told.append(f"{100 * rest / lost:.0f}% other")
    return f"lost {_text.duration(lost)}: {', '.join(told)}"
