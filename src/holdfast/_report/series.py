"""The series of all attempts: curves, step times and memory, each kept short."""

from __future__ import annotations

from collections import deque
from typing import Any

from holdfast._report.attempts import Life
from holdfast._report.columns import Curve, Levels, Times
from holdfast._report.json_lines import Lines, parse, real, whole
from holdfast._report.view import Event
from holdfast._store.folder import series
from holdfast._store.folder.layout import RunLayout

_MOST_METRICS = 200
_LATELY_SECONDS = 60.0
_MARKS = 400  # of snapshots

_OF_CGROUP = "the limit of its cgroup"
_OF_MACHINE = "the memory of the machine"


class Rows:
    """What the rows of a run tell, whoever reads them last."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._lines: dict[int, Lines] = {}
        self.curves: dict[str, Curve] = {}
        self.times = Times()
        self.levels = Levels()
        self.limit_name = ""
        self.has_gpu = False
        self.snapshots = Snapshots()
        self._lately: deque[tuple[float, int]] = deque()
        self._newest = 0

    def read(self, life: Life) -> bool | None:
        """Whether there was something new; None if the file is another one: all starts over."""
        lines = self._lines.get(life.number)
        if lines is None:
            lines = self._lines[life.number] = Lines(self._layout.series(life.number))
        is_new = False
        for piece in lines.read():
            if lines.has_started_over:
                return None
            for row in parse(piece):
                if series.is_row(row):
                    self._take(life, row)
                    is_new = True
        return is_new

    def rate(self, now: float) -> float | None:
        """Steps in a second, of late; None if none was made."""
        while self._lately and self._lately[0][0] < self._lately[-1][0] - _LATELY_SECONDS:
            self._lately.popleft()
        if len(self._lately) < 2 or now - self._lately[-1][0] > 2 * _LATELY_SECONDS:
            return None
        first, last = self._lately[0], self._lately[-1]
        if last[0] <= first[0] or last[1] <= first[1]:
            return None
        return (last[1] - first[1]) / (last[0] - first[0])

    def _take(self, life: Life, row: dict[str, Any]) -> None:
        t, step = real(row["t"]), whole(row["s"])
        if t is None or step is None or step < 0:
            return
        life.take_row(t, step, row)
        if life.number != self._newest:
            self._newest = life.number
            self._lately.clear()
        self._lately.append((t, step))
        histogram = row.get("h")
        if isinstance(histogram, list) and histogram:
            self.times.add(life.number, t, histogram)
        if "m" in row:
            self._take_metrics(life.number, step, row["m"])
        memory = row.get("mem")
        if isinstance(memory, dict):
            self._take_memory(t, memory)
        if count := whole(row.get("snaps")):
            self.snapshots.add(life.number, t, count, whole(row.get("mem_step")))

    def _take_metrics(self, attempt: int, step: int, found: object) -> None:
        for name, values in found.items() if isinstance(found, dict) else ():
            curve = self.curves.get(name)
            if curve is None:
                if len(self.curves) >= _MOST_METRICS:
                    continue
                curve = self.curves[name] = Curve()
            if type(values) is not list or len(values) < 4:
                continue
            at = values[5] if len(values) > 5 else None
            is_bad = len(values) > 4 and bool(values[4])
            curve.add(attempt, at if type(at) is int else step, values, is_bad=is_bad)

    def _take_memory(self, t: float, memory: dict[str, Any]) -> None:
        limit, used = real(memory.get("limit")), real(memory.get("cgroup"))
        if limit and used is not None:
            self.limit_name = _OF_CGROUP
        else:
            limit, available = real(memory.get("total")), real(memory.get("available"))
            if limit and available is not None:
                self.limit_name, used = _OF_MACHINE, limit - available
            else:
                known = [real(memory.get(name)) for name in ("rss", "workers")]
                used, limit = sum(each for each in known if each is not None) or None, None
        gpu = _gpu(memory.get("gpu"))
        self.has_gpu = self.has_gpu or gpu is not None
        self.levels.add(t, used, limit, gpu)


class Snapshots:
    """They come every other second, and nobody looks for a certain one: a few marks do."""

    def __init__(self) -> None:
        self._stride, self._filled = 1, 0
        self._found: list[tuple[int, float, float, int, int | None]] = []

    def add(self, attempt: int, t: float, count: int, step: int | None) -> None:
        last = self._found[-1] if self._found else None
        if self._filled < self._stride and last is not None and last[0] == attempt:
            self._found[-1] = (attempt, last[1], t, last[3] + count, step or last[4])
            self._filled += 1
            return
        if len(self._found) >= _MARKS:
            self._halve()
        self._found.append((attempt, t, t, count, step))
        self._filled = 1

    def _halve(self) -> None:
        kept: list[tuple[int, float, float, int, int | None]] = []
        is_pair = True
        for each in self._found:
            last = kept[-1] if kept else None
            if not is_pair and last is not None and last[0] == each[0]:
                kept[-1] = (each[0], last[1], each[2], last[3] + each[3], each[4] or last[4])
                is_pair = True
            else:
                kept.append(each)
                is_pair = False
        self._found, self._stride = kept, 2 * self._stride

    def events(self) -> list[Event]:
        """One for each mark."""
        return [
            Event(
                t=t,
                kind="snapshot",
                attempt=attempt,
                step=step,
                level="info",
                title="A snapshot" if count == 1 else f"{count:,} snapshots",
                text="" if step is None else f"step {step} is then in memory",
                count=count,
                until=until,
            )
            for attempt, t, until, count, step in self._found
        ]


def _gpu(value: object) -> float | None:
    """What is held on all GPUs: by the run's own processes, where the driver tells that."""
    if not isinstance(value, list):
        return real(value)
    known = [each for each in value if isinstance(each, list) and len(each) >= 4]
    found = [real(each[1] if each[3] is None else each[3]) for each in known]
    return sum(each or 0.0 for each in found) if found else None
