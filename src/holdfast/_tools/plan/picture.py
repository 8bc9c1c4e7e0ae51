"""A plan as a picture: goodput over the interval, and where the rest of the time goes.

Plain SVG that needs no font and no script, and follows the reader's light or dark setting.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from html import escape

from holdfast._tools.plan.advice import COMMON_SECONDS, Plan, Way
from holdfast._tools.plan.inputs import Inputs
from holdfast._tools.plan.units import shown

_WIDTH, _HEIGHT = 880, 580
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 848, 96, 356
_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
_MOST_TICKS = 6
_CROWDED_SECONDS = 1200  # too near to its neighbour to be written
_LETTER = 6.9  # its width at most, of the small ones
_LEAST_SPAN = 0.01  # of goodput, from the lowest line to the highest
_PARTS = {
    "repeated": ("repeated work", "lost"),
    "restarts": ("restarts", "down"),
    "queue": ("waiting for the queue", "queue"),
    "checkpoints": ("checkpoints", "saving"),
    "snapshots": ("snapshots in memory", "memory"),
}
_CLASSES = ("still", "beside", "ours")
_STYLE = """
svg { --paper: #ffffff; --ink: #1d2530; --faint: #5b6675; --line: #dde2e8; --wash: #e8f3ec;
  --ours: #1f7a4d; --beside: #2f6db5; --still: #a3611c; --lost: #b3402e; --down: #7a5ea8;
  --queue: #8a8f98; --saving: #2f6db5; --memory: #1f7a4d; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #14181d; --ink: #e8ecf1; --faint: #a3adba; --line: #313943; --wash: #1b2e25;
    --ours: #58c48d; --beside: #7fb2f0; --still: #e0a15c; --lost: #ef8473; --down: #b79ee6;
    --queue: #9aa2ad; --saving: #7fb2f0; --memory: #58c48d; } }
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); }
.title { font-size: 19px; font-weight: 650; } .faint { fill: var(--faint); }
.small { font-size: 12px; } .strong { font-weight: 650; } .end { text-anchor: end; }
.middle { text-anchor: middle; } .grid { stroke: var(--line); }
.halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; stroke-linejoin: round; }
.mark { stroke: var(--faint); stroke-dasharray: 4 4; } .curve { fill: none; stroke-width: 2.25; }
"""


def draw(plan: Plan, given: Inputs) -> str:
    """The whole file."""
    frame = _Frame(plan)
    gpus = f"{given.gpus:,} GPU{'' if given.gpus == 1 else 's'}"
    title = f"A checkpoint every {shown(plan.chosen.interval)}: {plan.chosen.goodput:.2%} goodput"
    about = (
        f"{gpus}, an interruption every {shown(plan.model.mtbf)}; a checkpoint takes "
        f"{shown(plan.model.cost)} from training and is on disk after {shown(plan.model.latency)}"
    )
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-labelledby="title about">',
        f'<title id="title">{escape(title)}</title><desc id="about">{escape(about)}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="var(--paper)"/>',
        _text(32, 38, title, "title"),
        _text(32, 62, about, "faint"),
        f'<clipPath id="plot"><rect x="{_LEFT}" y="{_TOP}" width="{_RIGHT - _LEFT}" '
        f'height="{_BOTTOM - _TOP}"/></clipPath>',
        *frame.draw_ground(plan),
        *frame.draw_marks(plan),
        *(frame.draw_way(way, name) for way, name in _named(plan)),
        *frame.draw_best(plan),
        *_draw_legend(plan),
        *_draw_rest(plan),
        "</svg>",
    ]
    return "\n".join(pieces) + "\n"


class _Frame:
    """From intervals and shares to places in the picture."""

    def __init__(self, plan: Plan) -> None:
        shown_until = max(plan.chosen.interval, plan.ways[0].best) * 12
        self.low = min(way.intervals[0] for way in plan.ways)
        self.high = min(max(way.intervals[-1] for way in plan.ways), shown_until)
        top = max(way.goodput for way in plan.ways)
        ends = [_at(way, plan.chosen.interval * factor) for way in plan.ways for factor in (0.2, 5)]
        span = max(_LEAST_SPAN, 1.15 * (top - min(ends)))
        self.top = min(1.0, top + 0.12 * span)
        self.bottom = max(0.0, self.top - 1.25 * span)

    def x(self, interval: float) -> float:
        share = math.log(interval / self.low) / math.log(self.high / self.low)
        return _LEFT + min(max(share, 0.0), 1.0) * (_RIGHT - _LEFT)

    def y(self, goodput: float) -> float:
        share = (goodput - self.bottom) / (self.top - self.bottom)
        return _BOTTOM - share * (_BOTTOM - _TOP)

    def draw_ground(self, plan: Plan) -> Iterator[str]:
        """What lies below the curves: the axes, and the intervals that are as good as the best."""
        left, right = (self.x(each) for each in plan.as_good)
        yield (
            f'<rect x="{left:.1f}" y="{_TOP}" width="{max(right - left, 2):.1f}" '
            f'height="{_BOTTOM - _TOP}" fill="var(--wash)"/>'
        )
        step = next(
            (each for each in _TICKS if (self.top - self.bottom) / each <= _MOST_TICKS), 0.25
        )
        for number in range(math.ceil(self.bottom / step), math.floor(self.top / step) + 1):
            y = self.y(number * step)
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>'
            digits = 1 if step < 0.01 else 0
            yield _text(_LEFT - 10, y + 4, f"{number * step:.{digits}%}", "faint small end")
        for interval in (1, 2, 5, 10, *COMMON_SECONDS):
            if self.low <= interval <= self.high and interval != _CROWDED_SECONDS:
                x = self.x(interval)
                yield f'<path class="grid" d="M{x:.1f} {_BOTTOM}v5"/>'
                yield _text(x, _BOTTOM + 20, shown(interval), "faint small middle")
        yield f'<path class="grid" d="M{_LEFT} {_BOTTOM}H{_RIGHT}"/>'
        yield _text(_RIGHT, _BOTTOM + 38, "between two checkpoints", "faint small end")
        yield _text(_LEFT, _TOP - 10, "goodput", "faint small")

    def draw_marks(self, plan: Plan) -> Iterator[str]:
        """Where the formulas have their best; they often agree."""
        found = [("Young", plan.young), ("Daly", plan.daly)]
        if abs(math.log(max(plan.daly, 1e-9) / max(plan.young, 1e-9))) < 0.1:
            found = [("Young, Daly", plan.daly)]
        for row, (name, interval) in enumerate(found):
            if not self.low <= interval <= self.high:
                continue
            x = self.x(interval)
            yield f'<path class="mark" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>'
            yield _text(x, _TOP - 10 - 14 * row, f"{name} {shown(interval)}", "small middle faint")

    def draw_way(self, way: Way, name: str) -> str:
        points = [
            (self.x(interval), self.y(goodput))
            for interval, goodput in zip(way.intervals, way.curve, strict=True)
            if interval <= self.high
        ]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        return (
            f'<path class="curve" clip-path="url(#plot)" stroke="var(--{name})" d="M{path}">'
            f"<title>{escape(way.name)}</title></path>"
        )

    def draw_best(self, plan: Plan) -> Iterator[str]:
        x, y = self.x(plan.chosen.interval), self.y(_at(plan.ways[-1], plan.chosen.interval))
        yield (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="var(--ours)" '
            'stroke="var(--paper)" stroke-width="2"/>'
        )
        # Below, since above stand the formulas.
        text = f"{shown(plan.chosen.interval)}: {plan.chosen.goodput:.2%}"
        inside = min(max(x, _LEFT + 56), _RIGHT - 56)
        yield _text(inside, y + 24, text, "strong middle halo")


def _named(plan: Plan) -> Iterator[tuple[Way, str]]:
    """Each way with its colour; the run's own is drawn last, on top."""
    names = _CLASSES if len(plan.ways) == len(_CLASSES) else (_CLASSES[0], _CLASSES[-1])
    yield from zip(plan.ways, names, strict=True)


def _draw_legend(plan: Plan) -> Iterator[str]:
    for row, (way, name) in enumerate(_named(plan)):
        y = 416 + 22 * row
        yield f'<path stroke="var(--{name})" stroke-width="3" d="M{_LEFT} {y - 4}h22"/>'
        yield _text(_LEFT + 32, y, way.name)
        yield _text(560, y, f"best every {shown(way.best)}", "faint end")
        yield _text(640, y, f"{way.goodput:.2%}", "strong end")


def _draw_rest(plan: Plan) -> Iterator[str]:
    """The time that makes no progress, as one bar."""
    rest = 1.0 - plan.chosen.goodput
    y, width = 512, _RIGHT - _LEFT
    yield _text(_LEFT, y - 14, f"Where the other {rest:.2%} go", "strong")
    at = float(_LEFT)
    labels: list[tuple[str, str]] = []
    for part, (label, colour) in _PARTS.items():
        share = plan.chosen.parts[part] / rest if rest > 0 else 0.0
        if share < 0.001:
            continue
        yield (
            f'<rect x="{at:.1f}" y="{y}" width="{max(share * width - 2, 1):.1f}" height="14" '
            f'rx="2" fill="var(--{colour})"/>'
        )
        at += share * width
        labels.append((f"{label} {plan.chosen.parts[part]:.2%}", colour))
    x = float(_LEFT)
    for text, colour in labels:
        wide = 15 + _LETTER * len(text)
        if x + wide > _RIGHT:
            x, y = float(_LEFT), y + 20
        yield f'<circle cx="{x + 5:.1f}" cy="{y + 31}" r="5" fill="var(--{colour})"/>'
        yield _text(x + 15, y + 35, text, "small")
        x += wide + 12


def _at(way: Way, interval: float) -> float:
    """Its goodput at an interval, between the two places of its curve that are nearest."""
    pairs = list(zip(way.intervals, way.curve, strict=True))
    for (low, before), (high, after) in itertools.pairwise(pairs):
        if low <= interval <= high:
            share = math.log(interval / low) / math.log(high / low)
            return before + share * (after - before)
    return pairs[0][1] if interval < pairs[0][0] else pairs[-1][1]


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'
