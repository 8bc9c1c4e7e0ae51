"""Recorded screens as one SVG: it plays once and then stands still, at the end of the story.

The end is what is drawn without any animation, so it is also what a reader sees
who wants no motion, or whose viewer plays none. The panel brings its own
background, so that it is the same on a light and on a dark page.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from tools.pictures.recording import Row, Shot

_CHARACTER, _LINE, _SIZE = 8.4, 20, 14
_PAD, _BAR = 16, 30
_INK, _DIM, _GOOD, _BAD = "#e6edf3", "#9aa6b2", "#7ee2a8", "#ff9d96"
_FRAME_SECONDS = 0.22  # what changes faster is left out, but for where it ends
_PAUSE_SECONDS = 0.7  # a longer pause of the recording is made so short
_MOST_SECONDS = 14.0  # all of it is played in, faster than it was if need be
_LAST_SECONDS = 0.5
_FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"


@dataclass(frozen=True)
class Pane:
    """One terminal: what stands above it, what it showed, and a text that is to stand out."""

    title: str
    shots: list[Shot]
    marked: str


@dataclass(frozen=True)
class _Line:
    """What one row of a pane shows from one moment to another; to the end if that is None."""

    pane: int
    row: int
    text: str
    start: float
    end: float | None


def draw(panes: list[Pane]) -> str:
    """The whole picture, as text."""
    clock = _Clock(panes)
    lines = [line for number, pane in enumerate(panes) for line in _lines(number, pane, clock)]
    heights = [_BAR + _PAD + _LINE * _rows_used(pane) for pane in panes]
    columns = max(len(line.text) for line in lines)
    width = round(2 * _PAD + _CHARACTER * columns)
    total = clock.total + _LAST_SECONDS
    style, drawn = [], []
    for number, line in enumerate(lines):
        name = f"l{number}"
        style.append(_motion(name, line, total))
        top = sum(heights[: line.pane]) + _BAR + _PAD + _LINE * line.row
        drawn.append(_written(name, line, top, panes[line.pane].marked))
    story = _told(panes)
    gone = ",".join(f".l{n}" for n, line in enumerate(lines) if line.end is not None)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {sum(heights) + 6}" '
            f'width="{width}" height="{sum(heights) + 6}" role="img" aria-labelledby="t d">',
            '<title id="t">A training is killed with kill -9 and started again: '
            "the weights are the same to the bit</title>",
            f'<desc id="d">{escape(story)}</desc>',
            "<style>",
            f"text{{font:{_SIZE}px {_FONT};fill:{_INK};white-space:pre}}",
            f".b{{fill:{_DIM};font-size:12px}}.c{{fill:{_DIM}}}.g{{fill:{_GOOD}}}.x{{fill:{_BAD}}}",
            f"{gone}{{opacity:0}}",
            "@media (prefers-reduced-motion:no-preference){",
            *style,
            "}",
            "</style>",
            f'<rect x="1" y="1" width="{width - 2}" height="{sum(heights) + 4}" rx="10" '
            'fill="#0d1117" stroke="#6e7781"/>',
            *_bars(panes, heights, width),
            *drawn,
            "</svg>\n",
        ]
    )


class _Clock:
    """From the time of the recording to that of the picture: pauses are shortened, and all
    of it is played faster if it would take too long to watch.
    """

    def __init__(self, panes: list[Pane]) -> None:
        moments = sorted({shot.seconds for pane in panes for shot in pane.shots})
        self._shown: dict[float, float] = {}
        at = 0.0
        for before, now in zip([moments[0], *moments], moments, strict=False):
            at += min(now - before, _PAUSE_SECONDS)
            self._shown[now] = at
        self._pace = min(1.0, _MOST_SECONDS / at) if at else 1.0
        self.total = at * self._pace

    def shown(self, seconds: float) -> float:
        return self._shown[seconds] * self._pace


def _rows_used(pane: Pane) -> int:
    return max(number + 1 for shot in pane.shots for number, row in enumerate(shot.screen) if row)


def _lines(number: int, pane: Pane, clock: _Clock) -> list[_Line]:
    """What each row shows and when, with the fastest changes left out."""
    found = []
    for row in range(_rows_used(pane)):
        kept: list[tuple[float, str]] = [(0.0, "")]
        for shot in pane.shots:
            text, at = _text(shot.screen[row]), clock.shown(shot.seconds)
            if text == kept[-1][1]:
                continue
            if len(kept) > 1 and at - kept[-1][0] < _FRAME_SECONDS and kept[-1][1]:
                kept[-1] = (kept[-1][0], text)  # the newer one in place of one hardly seen
            else:
                kept.append((at, text))
        for (start, text), (end, _) in zip(kept, [*kept[1:], (None, "")], strict=True):
            if text:
                found.append(_Line(number, row, text, start, end))
    return found


def _text(row: Row) -> str:
    text = ""
    for cell in row:
        text = text.ljust(cell.column) + cell.text
    return text.rstrip()


def _motion(name: str, line: _Line, total: float) -> str:
    start = 100 * line.start / total
    steps = [f"0%{{opacity:0}}{start:.2f}%{{opacity:0}}{start + 0.01:.2f}%{{opacity:1}}"]
    if line.end is not None:
        end = 100 * line.end / total
        steps.append(f"{end:.2f}%{{opacity:1}}{end + 0.01:.2f}%{{opacity:0}}100%{{opacity:0}}")
    return (
        f"@keyframes {name}{{{''.join(steps)}}}"
        f".{name}{{animation:{name} {total:.1f}s linear 1 both}}"
    )


def _written(name: str, line: _Line, top: float, marked: str) -> str:
    """One line, as wide as its columns whatever font draws it."""
    text = line.text
    inner = escape(text)
    if text.startswith("$"):
        command, sign, comment = text.partition("  #")
        inner = escape(command) + (f'<tspan class="c">{escape(sign + comment)}</tspan>')
    elif text.startswith("Killed"):
        inner = f'<tspan class="x">Killed</tspan>{escape(text[6:])}'
    elif marked and marked in text:
        before, _, after = text.partition(marked)
        inner = f'{escape(before)}<tspan class="g">{marked}</tspan>{escape(after)}'
    return (
        f'<text class="{name}" x="{_PAD}" y="{top}" xml:space="preserve" '
        f'textLength="{_CHARACTER * len(text):.1f}" lengthAdjust="spacingAndGlyphs">{inner}</text>'
    )


def _bars(panes: list[Pane], heights: list[int], width: int) -> list[str]:
    drawn = []
    for number, pane in enumerate(panes):
        top = sum(heights[:number])
        if number:
            drawn.append(f'<path d="M1 {top}H{width - 1}" stroke="#6e7781"/>')
        drawn.append(f'<text class="b" x="{_PAD}" y="{top + 20}">{escape(pane.title)}</text>')
    return drawn


def _told(panes: list[Pane]) -> str:
    """The last screens as text, for those who do not see them."""
    return "\n\n".join(
        f"{pane.title}:\n" + "\n".join(filter(None, map(_text, pane.shots[-1].screen)))
        for pane in panes
    )
