"""Progress: shows where the run stands, in the way that suits the output stream.

terminal   one line at its bottom, drawn four times a second
otherwise  a plain line now and then: a log file, a pipe, a notebook, TERM=dumb
HOLDFAST_PROGRESS=0 shows nothing, =plain only plain lines

A daemon thread does all of it and never raises. It writes nothing after `close` has returned. A
forked child neither draws nor inherits a lock that the thread holds.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from holdfast._environment.variables import progress_wish, terminal_is_dumb
from holdfast._text import is_terminal, minutes, say, short_number, stopwatch

if TYPE_CHECKING:
    from holdfast._run.progress.terminal import TerminalLine

    Display: TypeAlias = "PlainLines | TerminalLine"


# Soon at first, since a person wants to see that it runs; then seldom, to keep a log short.
PLAIN_GAPS_SECONDS = (10.0, 30.0, 60.0)
_JOIN_SECONDS = 1.0


class PlainLines:
    def __init__(self) -> None:
        self.tick_seconds = min(2.0, PLAIN_GAPS_SECONDS[0])
        self._gaps = iter(PLAIN_GAPS_SECONDS)
        self._due = time.monotonic() + next(self._gaps)

    def show(self, standing: Standing, rate: float | None, idle_seconds: float | None) -> None:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + next(self._gaps, PLAIN_GAPS_SECONDS[-1])
            say(plain_line(standing, rate, idle_seconds))

    def close(self) -> None:
        self._due = math.inf


class Progress:
    def __init__(self, look: Callable[[], Standing]) -> None:
        self._look = look
        self._display: Display | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._pid = 0

    def begin(self) -> None:
        if self._display is not None or (display := _choose_display()) is None:
            return
        self._pid = os.getpid()
        self._display, self._over = display, threading.Event()
        # The interpreter must not end while the thread is in the middle of a write.
        atexit.register(self.close)
        thread = threading.Thread(
            target=self._show, args=(display, self._over), name="holdfast-progress", daemon=True
        )
        thread.start()
        self._thread = thread  # not before: the link's thread may close it at any moment

    def close(self) -> None:
        """Remove the line. In a forked child do nothing: the line is the parent's."""
        display, thread = self._display, self._thread
        if display is None or os.getpid() != self._pid:
            return
        self._display = None
        self._over.set()
        display.close()
        atexit.unregister(self.close)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)  # a plain line may be half written

    def _show(self, display: Display, over: threading.Event) -> None:
        pace = ShownPace()
        while not over.is_set():
            with contextlib.suppress(Exception):  # a line of text must not cost a run
                standing = self._look()
                pace.observe(standing)
                if not over.is_set():
                    display.show(standing, pace.rate, pace.idle_seconds)
            over.wait(display.tick_seconds)


def _choose_display() -> Display | None:
    wish = progress_wish()
    if wish == "off" or sys.stderr is None or getattr(sys.stderr, "closed", False):
        return None
    if wish == "plain" or not is_terminal(sys.stderr) or terminal_is_dumb():
        return PlainLines()
    with contextlib.suppress(Exception):  # a stream may refuse the bar, or to be wrapped
        "━╸─".encode(sys.stderr.encoding)
        from holdfast._run.progress.terminal import TerminalLine  # imports tqdm

        return TerminalLine(sys.stderr)
    return PlainLines()


# -- The text of the progress line, and the pace of the steps --------------------------------------
# The text has no control character and no line break, whatever a metric or a phase is called. The
# line for a terminal is never wider than asked.


_GAP = "  "
_SHORTEST_BAR, _LONGEST_BAR = 8, 40
_NAME_CHARACTERS = 24
_METRICS = 8
# All metrics but the first rank below this; a bar in their place says more.
_MINOR_RANK = 40


@dataclass(frozen=True)
class Standing:
    """Where a run stands at one moment; None is unknown."""

    step: int
    steps: int | None = None
    epoch: int | None = None  # counted from 0; shown counted from 1
    epochs: int | None = None
    batch: int | None = None
    batches: int | None = None
    phase: str | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)  # None: not finite
    memory_step: int | None = None  # the newest step that is safe in memory
    disk_step: int | None = None  # the newest durable step


class _LinePart(NamedTuple):
    rank: float  # the lowest is left out first when there is no room
    text: str
    plain: str | None = None  # in a plain line, if it differs; "" leaves it out
    shorter: _LinePart | None = None  # takes its place before it is left out


def terminal_line(
    standing: Standing, rate: float | None, idle_seconds: float | None, width: int
) -> str:
    """One line of at most `width` columns; what matters least is left out first."""
    parts = [*_parts(standing, rate, idle_seconds), _safe(standing)]
    major = {part for part in parts if part.rank >= _MINOR_RANK}
    while cells(_join(parts)) > width and (len(parts) > 1 or parts[0].shorter):
        weakest = min(range(len(parts)), key=lambda place: parts[place].rank)
        shorter = parts[weakest].shorter
        parts[weakest : weakest + 1] = [] if shorter is None else [shorter]
    room = min(width - cells(_join(parts)) - len(_GAP), _LONGEST_BAR)
    fraction = _fraction(standing)
    if fraction is not None and room >= _SHORTEST_BAR and major <= set(parts):
        before = (standing.epoch is not None) + bool(standing.phase)
        parts.insert(before, _LinePart(0, draw_bar(fraction, room)))
    line = _join(parts)
    while line and cells(line) > width:
        line = line[:-1]
    return line


def plain_line(standing: Standing, rate: float | None, idle_seconds: float | None) -> str:
    parts = _parts(standing, rate, idle_seconds)
    words = [part.text if part.plain is None else part.plain for part in parts]
    return f"{', '.join(filter(None, words))}; {say_safe(standing)}"


def _parts(standing: Standing, rate: float | None, idle_seconds: float | None) -> list[_LinePart]:
    found: list[_LinePart] = []
    if standing.epoch is not None:
        now, epochs = standing.epoch + 1, standing.epochs
        now = now if epochs is None else min(now, epochs)  # there is none after the last
        found.append(_LinePart(70, _of("epoch", now, epochs)))
    if standing.phase:
        found.append(_LinePart(80, _clean(standing.phase)))
    step = _of("step", standing.step, standing.steps)
    found.append(_LinePart(90, step, shorter=_LinePart(95, f"step {standing.step}")))
    if standing.batch is not None and standing.steps is None:  # else the steps say it
        found.append(_LinePart(20, _of("batch", standing.batch, standing.batches), ""))
    if idle_seconds is not None:
        text, plain = stopwatch(idle_seconds), minutes(idle_seconds)
        found.append(_LinePart(60, f"no step for {text}", f"no step for {plain}"))
    elif rate:
        number = short_number(rate if rate >= 1 else 1 / rate)
        text, plain = ("/s", " steps/s") if rate >= 1 else (" s/step", " s per step")
        found.append(_LinePart(50, number + text, number + plain))
        if standing.steps is not None:
            left = max(standing.steps - standing.step, 0) / rate
            found.append(_LinePart(60, f"{stopwatch(left)} left", f"{minutes(left)} left"))
    for place, (name, value) in enumerate(list(standing.metrics.items())[:_METRICS]):
        rank = 55 if place == 0 else _MINOR_RANK - place
        found.append(_LinePart(rank, f"{_clean(str(name))} {short_number(value)}"))
    return found


def _of(name: str, number: int, total: int | None) -> str:
    return f"{name} {number}" if total is None else f"{name} {number}/{total}"


def say_safe(standing: Standing) -> str:
    """What a kill at this moment would leave."""
    memory, disk = standing.memory_step, standing.disk_step
    if disk is not None and (memory is None or memory <= disk):
        return f"safe: step {disk} on disk"
    if memory is None:
        return "nothing safe yet"
    return f"safe: step {memory} in memory" + ("" if disk is None else f", {disk} on disk")


def _safe(standing: Standing) -> _LinePart:
    """It stays longest; its long form gives way to all but the less important metrics."""
    memory, disk = standing.memory_step, standing.disk_step
    if memory is None and disk is None:
        return _LinePart(100, say_safe(standing))
    shorter = _LinePart(101, f"safe: {max(-1 if s is None else s for s in (memory, disk))}")
    if memory is not None and disk is not None and memory > disk:
        shorter = _LinePart(100, f"safe: {memory} (disk {disk})", shorter=shorter)
    return _LinePart(_MINOR_RANK, say_safe(standing), shorter=shorter)


def _join(parts: list[_LinePart]) -> str:
    return _GAP.join(part.text for part in parts)


def cells(text: str) -> int:
    """How many columns a terminal may need for it; rather too many than too few."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _clean(text: str) -> str:
    shown = "".join(c if c.isprintable() else "?" for c in text)
    return shown if len(shown) <= _NAME_CHARACTERS else shown[: _NAME_CHARACTERS - 1] + "~"


def draw_bar(fraction: float, width: int) -> str:
    """
    >>> draw_bar(0.5, 5)
    '━━╸──'
    """
    fraction = min(max(fraction, 0.0), 1.0)
    full, half = divmod(int(fraction * width * 2), 2)
    return "━" * full + "╸" * half + "─" * (width - full - half)


def _fraction(standing: Standing) -> float | None:
    in_epoch = (standing.batch or 0) / standing.batches if standing.batches else 0.0
    if standing.steps:
        return standing.step / standing.steps
    if standing.epoch is not None and standing.epochs:
        return (standing.epoch + in_epoch) / standing.epochs
    return in_epoch if standing.batches else None


# The pace is measured over the last half minute of this attempt. So a slow first step (a
# compilation) and a phase without steps (an evaluation) are forgotten at once.
_WINDOW_SECONDS = 30.0
_FEWEST_CHANGES = 3  # kept of steps that are slower than the window
_SHORTEST_MEASURE_SECONDS = 0.5
_IDLE_SECONDS = 10.0


class ShownPace:
    """How fast steps come now, from samples; not every step need be observed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changes: deque[tuple[float, int]] = deque()
        self._step: int | None = None
        self._seen = self._moved = clock()
        self._paused = 0.0

    def observe(self, standing: Standing) -> None:
        now = self._clock()
        step = standing.step
        if self._step is None or step < self._step:
            self._changes.clear()  # the first sample, or another loop: nothing to compare with
        elif step == self._step:
            if standing.phase is not None:
                self._paused += now - self._seen
        else:
            # The first change starts the measure, since the first step is not like the others.
            self._changes.append((now - self._paused, step))
        if step != self._step or standing.phase is not None:
            self._moved = now
        self._step, self._seen = step, now
        oldest = now - self._paused - _WINDOW_SECONDS
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
