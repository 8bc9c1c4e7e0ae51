"""Writes the series of an attempt: about one row a second, from the shared words.

At a boundary the trainer stores its time into a ring of 256 and counts the step; a step costs no
more. The time is stored first, so every counted step has one, even after a kill. The ring is read
four times a second. Steps shorter than a millisecond overrun it: their number stays exact, and only
some of their durations are recorded.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast._keeper.metric_batches import add_fold
from holdfast._store.folder import series
from holdfast._store.memory import control

_SIZE = control.RING_MASK + 1
_MOST_RANKS = 256  # whose waits are written: of more, those at both ends
_RANKS_PER_SECOND = 8
_OF_MEMORY = ("rss", "workers", "shm", "cgroup", "limit", "available", "total", "gpu")


class Steps:
    """Reads from the ring how long steps took."""

    def __init__(self, words: Any) -> None:
        self._words = words
        self.step: int | None = None  # the last one observed; None: the run is being opened
        self.base = 0  # the one at which the attempt began
        self.histogram: dict[int, int] = {}

    def poll(self) -> None:
        """Count the steps that are complete by now."""
        words = self._words
        has_begun = words[control.WORK] == 0 or words[control.LOOP_NS]
        if self.step is None and not has_begun:
            return  # the step counter does not belong to the run yet
        newest = int(words[control.STEP])
        if self.step is None:
            self.step = int(words[control.LOOP_STEP]) if words[control.LOOP_NS] else newest
            self.base = self.step
        if newest <= self.step:
            return
        times = words[control.RING : control.RING + _SIZE]
        times = list(times)  # a copy, before the trainer's position is read again
        # It may be storing the time of the next step: do not trust that entry.
        oldest = int(words[control.STEP]) - _SIZE + 2
        for step in range(max(self.step, oldest), newest):
            self._add(step, times)
        self.step = newest

    def _add(self, step: int, times: Sequence[int]) -> None:
        """The time from one boundary to the next, without saves and phases."""
        words = self._words
        began, ended = times[step % _SIZE], times[(step + 1) % _SIZE]
        if step == words[control.LOOP_STEP]:
            began = int(words[control.LOOP_NS])
        took = ended - began - control.aside_ns(words, step)
        if began and took > 0:
            bucket = series.bucket_of(took / 1e9)
            self.histogram[bucket] = self.histogram.get(bucket, 0) + 1


class SeriesWriter:
    """The series of one attempt. Raises nothing: a row that cannot be written waits."""

    def __init__(self, path: Path, words: Any) -> None:
        self._path = path
        self._words = words
        self._steps = Steps(words)
        self._metrics: dict[str, list[Any]] = {}
        self._began = time.time()
        self._row_step: int | None = None  # at the end of the last row
        self._told = dict.fromkeys(("save", "agree", "rest", "snaps"), 0)
        self._phase: str | None = None
        self._rested = 0  # the time in phases that is assigned to a phase
        self._phases: dict[str, int] = {}
        self._sampled: Any = None  # the time of the last memory sample that was written
        self._next_at = self._next_waits = 0.0
        self._is_over = self._is_ended = False
        self._has_polled = False

    def take(self, metrics: Mapping[str, list[Any]]) -> None:
        """Add metrics from the trainer."""
        for name, fold in metrics.items():
            add_fold(self._metrics, name, fold)

    def see_phase(self, name: str | None) -> None:
        """The trainer has entered another phase, or left it."""
        self._ascribe(self._phase or name)
        self._phase = name

    def _ascribe(self, phase: str | None) -> None:
        """Assign the rest time since the last call to this phase, if there is one."""
        rested = self._totals()["rest"]
        if phase is not None and rested > self._rested:
            self._phases[phase] = self._phases.get(phase, 0) + rested - self._rested
            self._rested = rested

    def poll(self, now: float, facts: Callable[[], dict[str, Any]]) -> None:
        """Read the new steps, and write a row if one is due."""
        try:
            if not self._has_polled:
                self._has_polled = True
                self._go_on_with(self._path)
            self._steps.poll()
            if now >= self._next_at and not self._is_over:
                self._write(now, facts())
        except Exception:  # noqa: BLE001  the keeper must go on
            traceback.print_exc()
            self._is_over = True  # report it once

    def end(self, facts: Callable[[], dict[str, Any]]) -> None:
        """Write the last row now, unless it would contain nothing new."""
        before, self._next_at = self._row_step, 0.0
        if self._is_ended and int(self._words[control.STEP]) == before and not self._metrics:
            return
        self._is_ended = True
        self.poll(time.monotonic(), facts)

    def _write(self, now: float, facts: dict[str, Any]) -> None:
        step = self._steps.step
        if step is None:
            return
        before = self._steps.base if self._row_step is None else self._row_step
        row: series.Row = {"t": round(time.time(), 3), "s": step, "n": max(0, step - before)}
        if self._steps.histogram:
            row["h"] = [[bucket, n] for bucket, n in sorted(self._steps.histogram.items())]
        self._ascribe(self._phase)
        if self._phases:
            row["phases"] = {name: round(ns / 1e9, 6) for name, ns in self._phases.items()}
        if self._phase is not None:
            row["phase"] = self._phase
        totals = self._totals()
        for name in ("save", "agree", "rest"):
            seconds = round((totals[name] - self._told[name]) / 1e9, 6)
            if seconds > 0:
                row[name] = seconds
        if totals["snaps"] > self._told["snaps"]:
            row["snaps"] = totals["snaps"] - self._told["snaps"]
        if self._words[control.EPOCH]:
            row["epoch"] = int(self._words[control.EPOCH])
        for name in ("mem_step", "disk_step"):
            if facts.get(name) is not None:
                row[name] = facts[name]  # type: ignore[literal-required]  # both are of a row
        if self._metrics:
            row["m"] = {k: [*map(_short, fold[:3]), *fold[3:]] for k, fold in self._metrics.items()}
        sample = facts.get("memory") or {}
        if sample.get("t") != self._sampled:
            row["mem"] = {k: sample[k] for k in _OF_MEMORY if sample.get(k) is not None}
        waits = facts.get("waits") or {}
        if waits and now >= self._next_waits:
            row["waits"] = waits_of(waits)
        self._append(now, row, totals, sample.get("t"))

    def _append(
        self, now: float, row: series.Row, totals: dict[str, int], sampled: float | None
    ) -> None:
        length = series.append(self._path, row)
        period = series.period_seconds(row["t"] - self._began, length)
        self._next_at = now + period
        if not length:
            return  # a full disk: the next row contains it all
        self._row_step, self._told, self._sampled = row["s"], totals, sampled
        self._steps.histogram, self._metrics, self._phases = {}, {}, {}
        if "waits" in row:
            self._next_waits = now + max(period, len(row["waits"]) / _RANKS_PER_SECOND)

    def _totals(self) -> dict[str, int]:
        """The totals since the attempt began, including what is in progress."""
        words, now = self._words, time.monotonic_ns()
        totals = {
            "save": int(words[control.SAVED_NS]),
            "agree": int(words[control.AGREED_NS]),
            "rest": int(words[control.RESTED_NS]),
            "snaps": int(words[control.SNAPSHOTS]),
        }
        # Read each once: the trainer may reset it before a second read.
        rests, works = int(words[control.REST_NS]), int(words[control.WORK_NS])
        if rests:
            totals["rest"] += max(0, now - rests)
        name = {control.SAVES: "save", control.AGREES: "agree"}.get(words[control.WORK])
        if name is not None and works:
            totals[name] += max(0, now - works)
        return totals

    def _go_on_with(self, path: Path) -> None:
        """Continue the rows of a keeper that died before this one."""
        found = series.first_and_last(path)
        if found is not None:
            self._began = found[0]["t"]
            self._row_step = self._steps.step = found[1]["s"]
            # What it had written of these totals is unknown: count from now on.
            self._told = self._totals()
            self._rested = self._told["rest"]


def _short(value: float | None) -> float | None:
    """Nine digits: as many as a 32-bit float needs."""
    return None if value is None else float(f"{value:.9g}")


def waits_of(waits: Mapping[int, Sequence[float]]) -> dict[str, float]:
    """How long each rank waits in a step, the shortest first."""
    middle = {rank: statistics.median(samples) for rank, samples in waits.items() if samples}
    ranks = sorted(middle, key=lambda rank: (middle[rank], rank))
    if len(ranks) > _MOST_RANKS:
        ranks = ranks[: _MOST_RANKS // 2] + ranks[-_MOST_RANKS // 2 :]
    return {str(rank): round(middle[rank], 6) for rank in ranks}
