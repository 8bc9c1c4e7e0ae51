"""The words of the progress line: pure functions from a standing to text.

No text of here holds a control character or a line break, whatever a metric or a phase is called,
and the line for a terminal is never wider than asked.
"""

from __future__ import annotations

import time
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# -- Where a run stands at one moment, as the progress line needs to know it -----------------------


@dataclass(frozen=True)
class Standing:
    """What there is to show; None is what nobody knows."""

    step: int
    steps: int | None = None
    epoch: int | None = None  # counted from 0; people see it counted from 1
    epochs: int | None = None
    batch: int | None = None
    batches: int | None = None
    phase: str | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # None: no finite number
    memory_step: int | None = None  # the newest step that is safe in memory
    disk_step: int | None = None  # the newest durable step


_GAP = "  "
_BAR_CELLS = range(8, 41)  # a shorter bar says nothing, a longer one no more
_NAME_CHARACTERS = 24
_METRICS = 8
# Of less weight are all metrics but the first; a bar in their place is more telling.
_MINOR_RANK = 40


def cells(text: str) -> int:
    """How many columns a terminal may need for it; rather too many than too few."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def cut(text: str, width: int) -> str:
    """As much of the beginning as fits."""
    while text and cells(text) > width:
        text = text[:-1]
    return text


def clean(text: str) -> str:
    """A name of the user's, fit for one line."""
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= _NAME_CHARACTERS else shown[: _NAME_CHARACTERS - 1] + "~"


def say_number(value: float | None) -> str:
    """Three digits that matter, always about as wide.

    >>> say_number(0.2312), say_number(1234.5), say_number(3e-5), say_number(None)
    ('0.231', '1234', '3.00e-05', 'nan')
    """
    if value is None or value != value:
        return "nan"
    size = abs(value)
    if size == 0:
        return "0"
    if 1e-3 <= size < 100:
        return f"{value:#.3g}".rstrip(".")
    return f"{value:.0f}" if 100 <= size < 1e6 else f"{value:.2e}"


def say_clock(seconds: float) -> str:
    """
    >>> say_clock(156), say_clock(3756), say_clock(273_600)
    ('2:36', '1:02:36', '3 d 4 h')
    """
    minutes, second = divmod(_whole(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def say_duration(seconds: float) -> str:
    """
    >>> say_duration(156), say_duration(3756), say_duration(12)
    ('2 min 36 s', '1 h 2 min', '12 s')
    """
    minutes, second = divmod(_whole(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minute} min"
    return f"{minute} min {second} s" if minute else f"{second} s"


def _whole(seconds: float) -> int:
    return round(min(max(seconds, 0.0), 1e10))  # a rate near nothing would be an eternity


def say_safe(standing: Standing) -> str:
    """What a kill at this moment would leave."""
    memory, disk = standing.memory_step, standing.disk_step
    if disk is not None and (memory is None or memory <= disk):
        return f"safe: step {disk} on disk"
    if memory is None:
        return "nothing safe yet"
    return f"safe: step {memory} in memory" + ("" if disk is None else f", {disk} on disk")


def draw_bar(fraction: float, width: int, *, ascii_only: bool) -> str:
    """
    >>> draw_bar(0.5, 10, ascii_only=True)
    '[####....]'
    """
    fraction = min(max(fraction, 0.0), 1.0)
    if ascii_only:
        full = int(fraction * (width - 2))
        return f"[{'#' * full}{'.' * (width - 2 - full)}]"
    full, half = divmod(int(fraction * width * 2), 2)
    return "━" * full + "╸" * half + "─" * (width - full - half)


def _fraction(standing: Standing) -> float | None:
    """How much of the whole run is done, as far as anybody knows."""
    in_epoch = (standing.batch or 0) / standing.batches if standing.batches else 0.0
    if standing.steps:
        return standing.step / standing.steps
    if standing.epoch is not None and standing.epochs:
        return (standing.epoch + in_epoch) / standing.epochs
    return in_epoch if standing.batches else None


def seconds_left(standing: Standing, rate: float | None) -> float | None:
    if standing.steps is None or not rate:
        return None
    return max(standing.steps - standing.step, 0) / rate


def _of(name: str, number: int, total: int | None) -> str:
    return f"{name} {number}" if total is None else f"{name} {number}/{total}"


def _epoch(over: int, total: int | None) -> str:
    # At the end all of them are over, and there is no next one.
    return _of("epoch", over + 1 if total is None else min(over + 1, total), total)


def _metrics(standing: Standing) -> list[str]:
    chosen = list(standing.metrics.items())[:_METRICS]
    return [f"{clean(str(name))} {say_number(value)}" for name, value in chosen]


@dataclass(frozen=True)
class _Part:
    text: str
    rank: float  # the lowest gives way first when there is no room
    shorter: _Part | None = None  # to which it gives way


def terminal_line(
    standing: Standing,
    rate: float | None,
    idle_seconds: float | None,
    width: int,
    *,
    ascii_only: bool = False,
) -> str:
    """One line of at most `width` columns; what matters least is left out first."""
    before: list[_Part] = []
    after: list[_Part] = []
    if standing.epoch is not None:
        before.append(_Part(_epoch(standing.epoch, standing.epochs), 70))
    if standing.phase:
        before.append(_Part(clean(standing.phase), 80))
    step = _of("step", standing.step, standing.steps)
    after.append(_Part(step, 90, shorter=_Part(f"step {standing.step}", 95)))
    if standing.batch is not None and standing.steps is None:  # else it is in the steps already
        after.append(_Part(_of("batch", standing.batch, standing.batches), 20))
    left = seconds_left(standing, rate)
    if idle_seconds is not None:
        after.append(_Part(f"no step for {say_clock(idle_seconds)}", 60))
    elif rate:
        pace = f"{say_number(rate)}/s" if rate >= 1 else f"{say_number(1 / rate)} s/step"
        after.append(_Part(pace, 50))
        if left is not None:
            after.append(_Part(f"{say_clock(left)} left", 60))
    for place, text in enumerate(_metrics(standing)):
        after.append(_Part(text, 55 if place == 0 else _MINOR_RANK - place))
    after.append(_safe(standing))
    parts = _fit(before + after, width)
    fraction = _fraction(standing)
    room = width - cells(_join(parts)) - len(_GAP)
    is_whole = {p for p in before + after if p.rank >= _MINOR_RANK} <= set(parts)
    if fraction is not None and room >= _BAR_CELLS.start and is_whole:
        bar = draw_bar(fraction, min(room, _BAR_CELLS.stop - 1), ascii_only=ascii_only)
        parts.insert(len(before), _Part(bar, 0))
    line = _join(parts)
    if ascii_only:
        line = line.encode("ascii", "replace").decode("ascii")
    return cut(line, width)


def _safe(standing: Standing) -> _Part:
    """What stays longest; its long form makes room for all but the less important metrics."""
    memory, disk = standing.memory_step, standing.disk_step
    known = [step for step in (memory, disk) if step is not None]
    if not known:
        return _Part(say_safe(standing), 100)
    shortest = _Part(f"safe: {max(known)}", 101)
    middle = shortest
    if memory is not None and disk is not None and memory > disk:
        middle = _Part(f"safe: {memory} (disk {disk})", 100, shortest)
    return _Part(say_safe(standing), _MINOR_RANK, middle)


def _fit(parts: list[_Part], width: int) -> list[_Part]:
    while cells(_join(parts)) > width:
        weakest = min(range(len(parts)), key=lambda place: parts[place].rank)
        part = parts[weakest]
        if part.shorter is None and len(parts) == 1:
            break
        parts[weakest : weakest + 1] = [] if part.shorter is None else [part.shorter]
    return parts


def _join(parts: list[_Part]) -> str:
    return _GAP.join(part.text for part in parts)


def plain_line(standing: Standing, rate: float | None, idle_seconds: float | None) -> str:
    """The same for a log: a sentence without end."""
    words = []
    if standing.epoch is not None:
        words.append(_epoch(standing.epoch, standing.epochs))
    if standing.phase:
        words.append(clean(standing.phase))
    words.append(_of("step", standing.step, standing.steps))
    left = seconds_left(standing, rate)
    if idle_seconds is not None:
        words.append(f"no step for {say_duration(idle_seconds)}")
    elif rate:
        slow = f"{say_number(1 / rate)} s per step"
        words.append(f"{say_number(rate)} steps/s" if rate >= 1 else slow)
        if left is not None:
            words.append(f"{say_duration(left)} left")
    words += _metrics(standing)
    return f"{', '.join(words)}; {say_safe(standing)}"


# -- How fast the steps come now -------------------------------------------------------------------
# Measured over the last half minute of this life: a slow first step (a compilation) and a phase in
# which no step is made (an evaluation) are forgotten at once. Steps of a former life never count.


WINDOW_SECONDS = 30.0
# Steps slower than the window still need a few of them to tell their pace.
_FEWEST_CHANGES = 3
_SHORTEST_MEASURE_SECONDS = 0.5
_IDLE_SECONDS = 10.0


class Pace:
    """Fed with what is seen now and then; the steps need not be seen one by one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changes: deque[tuple[float, int]] = deque()
        self._step: int | None = None
        self._seen = self._moved = clock()
        self._paused = 0.0

    def note(self, standing: Standing) -> None:
        now = self._clock()
        step = standing.step
        if self._step is None or step < self._step:
            self._changes.clear()  # the first look, or another loop: nothing to compare with
        elif step == self._step:
            if standing.phase is not None:
                self._paused += now - self._seen
        else:
            # The first change starts the measure, since the first step is not like the others.
            self._changes.append((now - self._paused, step))
        if step != self._step or standing.phase is not None:
            self._moved = now
        self._step, self._seen = step, now
        self._forget(now - self._paused - WINDOW_SECONDS)

    def _forget(self, oldest: float) -> None:
        while len(self._changes) > _FEWEST_CHANGES and self._changes[0][0] < oldest:
            self._changes.popleft()

    @property
    def rate(self) -> float | None:
        """Steps per second; None until there is something to measure."""
        if len(self._changes) < 2:
            return None
        (began, first), (ended, last) = self._changes[0], self._changes[-1]
        seconds = ended - began
        return (last - first) / seconds if seconds >= _SHORTEST_MEASURE_SECONDS else None

    @property
    def idle_seconds(self) -> float | None:
        """How long no step has come, if that is much longer than a step takes."""
        idle = self._seen - self._moved
        usual = 10 / self.rate if self.rate else 0.0
        return idle if idle > max(_IDLE_SECONDS, usual) else None
