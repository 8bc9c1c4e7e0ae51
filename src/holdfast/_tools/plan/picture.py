"""A plan as an SVG: goodput over the interval, and where the rest of the time goes.

It needs no font and no script, and follows the reader's light or dark setting.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from holdfast._tools.plan.advice import COMMON_SECONDS, Plan
from holdfast._tools.plan.units import shown

_WIDTH, _HEIGHT = 880, 532
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 848, 96, 356
_LEGEND = 416  # the height of its first row
_STEPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)  # between two lines of the grid
_MOST_LINES = 6
_LEAST_SPAN = 0.01  # of goodput, from the lowest line to the highest
_OTHER_COLOURS = ("var(--still)", "var(--beside)")
_STYLE = """
svg { --paper: #ffffff; --ink: #1d2530; --faint: #5b6675; --line: #dde2e8; --wash: #e8f3ec;
  --ours: #1f7a4d; --beside: #2f6db5; --still: #a3611c; }
@media (prefers-color-scheme: dark) {
  svg { --paper: #14181d; --ink: #e8ecf1; --faint: #a3adba; --line: #313943; --wash: #1b2e25;
    --ours: #58c48d; --beside: #7fb2f0; --still: #e0a15c; } }
text { font: 13px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); }
.title { font-size: 19px; font-weight: 650; } .faint { fill: var(--faint); font-size: 12px; }
.strong { font-weight: 650; } .end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: var(--line); } .curve { fill: none; stroke-width: 2.25; }
"""


def draw(plan: Plan) -> str:
    model, chosen, gpus = plan.model, plan.chosen, plan.given.gpus
    title = f"A checkpoint every {shown(chosen.interval)}: {chosen.goodput:.2%} goodput"
    about = (
        f"{gpus:,} GPU{'' if gpus == 1 else 's'}, an interruption every "
        f"{shown(model.mtbf)}; a checkpoint takes {shown(model.cost)} from training and is on disk "
        f"after {shown(model.latency)}"
    )
    pieces = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-labelledby="title about">',
        f'<title id="title">{escape(title)}</title><desc id="about">{escape(about)}</desc>',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="var(--paper)"/>',
        _text(32, 38, title, "title"),
        _text(32, 62, about, "faint"),
        *_draw_curves(plan),
        _text(_LEFT, 490, f"Where the other {1.0 - chosen.goodput:.2%} go", "strong"),
        _text(_LEFT, 510, plan.losses),
        "</svg>",
    ]
    return "\n".join(pieces) + "\n"


def _draw_curves(plan: Plan) -> Iterator[str]:
    chosen = plan.chosen.interval
    low = min(way.intervals[0] for way in plan.ways)
    high = max(way.intervals[-1] for way in plan.ways)
    high = min(high, max(chosen, plan.ways[0].best) * 12)
    points = [point for way in plan.ways for point in zip(way.intervals, way.curve, strict=True)]
    top = max(way.goodput for way in plan.ways)
    near = (goodput for interval, goodput in points if chosen / 5 <= interval <= chosen * 5)
    span = max(_LEAST_SPAN, 1.3 * (top - min(near, default=top)))
    top = min(1.0, top + 0.1 * span)
    bottom = max(0.0, top - 1.25 * span)

    def x(interval: float) -> float:
        share = math.log(interval / low) / math.log(high / low)
        return _LEFT + min(max(share, 0.0), 1.0) * (_RIGHT - _LEFT)

    def y(goodput: float) -> float:
        return _BOTTOM - (max(goodput, bottom) - bottom) / (top - bottom) * (_BOTTOM - _TOP)

    left, right = map(x, plan.ways[-1].as_good)
    yield (
        f'<rect x="{left:.1f}" y="{_TOP}" width="{max(right - left, 2):.1f}" '
        f'height="{_BOTTOM - _TOP}" fill="var(--wash)"/>'
    )
    step = next((each for each in _STEPS if (top - bottom) / each <= _MOST_LINES), 0.25)
    for number in range(math.ceil(bottom / step), math.floor(top / step) + 1):
        goodput = number * step
        yield f'<path class="grid" d="M{_LEFT} {y(goodput):.1f}H{_RIGHT}"/>'
        yield _text(_LEFT - 10, y(goodput) + 4, f"{goodput:.1%}", "faint end")
    for interval in (1, 2, 5, 10, *COMMON_SECONDS):
        if low <= interval <= high and interval != 1200:  # too near to its neighbours
            yield f'<path class="grid" d="M{x(interval):.1f} {_BOTTOM}v5"/>'
            yield _text(x(interval), _BOTTOM + 20, shown(interval), "faint middle")
    yield _text(_RIGHT, _BOTTOM + 38, "between two checkpoints", "faint end")
    yield _text(_LEFT, _TOP - 10, "goodput", "faint")
    colours = (*_OTHER_COLOURS[: len(plan.ways) - 1], "var(--ours)")
    for row, (way, colour) in enumerate(zip(plan.ways, colours, strict=True)):
        path = "L".join(
            f"{x(interval):.1f} {y(goodput):.1f}"
            for interval, goodput in zip(way.intervals, way.curve, strict=True)
            if interval <= high
        )
        name = f"<title>{escape(way.name)}</title>"
        yield f'<path class="curve" stroke="{colour}" d="M{path}">{name}</path>'
        legend = _LEGEND + 22 * row
        yield f'<path stroke="{colour}" stroke-width="3" d="M{_LEFT} {legend - 4}h22"/>'
        yield _text(_LEFT + 32, legend, way.name)
        yield _text(640, legend, f"best every {shown(way.best)}: {way.goodput:.2%}", "end")
    at, height = x(plan.chosen.interval), y(plan.chosen.goodput)
    yield f'<circle cx="{at:.1f}" cy="{height:.1f}" r="6" fill="var(--ours)"/>'
    text = f"{shown(plan.chosen.interval)}: {plan.chosen.goodput:.2%}"
    yield _text(min(max(at, _LEFT + 56), _RIGHT - 56), height + 24, text, "strong middle")


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'
