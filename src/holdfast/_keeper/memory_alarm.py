"""The trainer's memory: what is used, by which process, and when it will be full.

Only /proc, /sys and /dev/shm are read: a file system that hangs must not block the keeper's loop.
The interval depends on how little is left and on the cost of a sample.

An alarm begins an episode. Within it, the next alarm comes when half of the remaining time is gone.
So a run loses no more than a checkpoint takes, and a false alarm costs a few checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from dataclasses import dataclass
from typing import Any

from holdfast._environment.processes.cgroup import (
    Counted,
    MemoryCgroup,
    first_counters,
    read_counters,
)
from holdfast._environment.processes.ended import Descendants
from holdfast._environment.processes.memory_growth import Forecast, Growth, MemoryHistory
from holdfast._environment.processes.memory_sample import Sampler

_CALM_SECONDS = 1.0  # between two samples
_PRESSED_SECONDS = 0.1
_ENDED_SECONDS = 60.0  # processes that ended earlier have little to do with a death
_BUDGET = 0.003  # of one core
_BLIND_SECONDS = 60.0  # after an unexpected error
_LEAST_LEAD_SECONDS = 30.0  # between an alarm and the limit
_LEAVING_SECONDS = 10.0
_OVER_SECONDS = 10.0  # without danger, until an episode is over
_LEAST_PAUSE_SECONDS = 1.0  # between two alarms of one episode
_FULL = 0.8  # of a cgroup's limit
_FREED_SECONDS = 0.5  # in which the kernel frees the memory of a process that it has killed


@dataclass(frozen=True)
class Alarm:
    """The limit is near: what is in memory must be durable by then."""

    forecast: Forecast
    is_first: bool  # of its episode

    def figures(self) -> dict[str, Any]:
        """For the journal and for the trainer."""
        found = self.forecast
        return {
            "what": found.what,
            "seconds": round(found.seconds, 1),
            "bytes_per_second": int(found.bytes_per_second),
            "used": int(found.used),
            "limit": int(found.limit),
        }


class Episodes:
    """Decides when to raise an alarm, and when not to repeat it."""

    def __init__(self) -> None:
        self._told_seconds: float | None = None  # left at the last alarm; None: no danger
        self._told_at = 0.0
        self._seen_at = 0.0  # the last time there was danger

    def alarm(
        self, now: float, forecast: Forecast | None, needed_seconds: float, *, is_busy: bool
    ) -> Alarm | None:
        """An alarm if a save of `needed_seconds` must begin now to fit before the limit."""
        lead = max(_LEAST_LEAD_SECONDS, 3 * needed_seconds + _LEAVING_SECONDS)
        told = self._told_seconds
        if told is None and forecast is not None and forecast.bytes_per_second <= 0:
            forecast = None  # full, but not growing: that is no news
        # A forecast fluctuates: ending an episode needs twice the lead.
        if forecast is None or forecast.seconds > (lead if told is None else 2 * lead):
            if told is not None and now - self._seen_at > _OVER_SECONDS:
                self._told_seconds = None
            return None
        self._seen_at = now
        if told is not None:
            is_soon = is_busy or now - self._told_at < _LEAST_PAUSE_SECONDS
            if is_soon or forecast.seconds > told / 2:
                return None
        self._told_seconds, self._told_at = forecast.seconds, now
        return Alarm(forecast, is_first=told is None)


class MemoryWatch:
    """Samples the memory of one trainer and its children. Raises nothing: saving must go on."""

    def __init__(self, pid: int, counters: dict[str, Any] | None = None) -> None:
        """`counters` are from before the trainer could run out of memory."""
        self._pid = pid
        self._first = counters
        self._has_begun = False
        self._episodes = Episodes()
        self._forecast: Forecast | None = None
        self.newest: dict[str, Any] | None = None
        self.next_at: float | None = 0.0
        with contextlib.suppress(Exception):  # no descriptor is free, or /sys is closed: see sample
            self._begin()

    def _begin(self) -> None:
        self._sampler = Sampler(self._pid)
        # The trainer may be dead already: the keeper starts in its cgroup.
        self._sampler.cgroup = self._sampler.cgroup or MemoryCgroup.find(os.getpid())
        self._family = Descendants(self._pid, self._sampler.tree)
        self._history = MemoryHistory()
        self._growth = Growth()
        self._full_at = 0.0
        self._counted = Counted(first_counters(self._first, read_counters(self._sampler.cgroup)))
        self._has_begun = True

    @property
    def before(self) -> dict[str, Any] | None:
        """The kernel's counters from some seconds ago."""
        return self._counted.before if self._has_begun else None

    def sample(self, now: float) -> None:
        """Take a sample, and set when the next one is due."""
        began = time.thread_time()
        try:
            if not self._has_begun:
                self._begin()
            period = self._sample(now)
        except Exception:  # noqa: BLE001  the keeper must go on
            traceback.print_exc()
            period = _BLIND_SECONDS
        self.next_at = now + max(period, (time.thread_time() - began) / _BUDGET)

    def _sample(self, now: float) -> float:
        """Returns the seconds until the next one."""
        is_full = now >= self._full_at
        sample = self._sampler.take(full=is_full)
        if is_full:
            self._full_at = now + _CALM_SECONDS
            self._family.look(self._sampler.pids)
            self._counted.add(read_counters(self._sampler.cgroup), now)
        if not sample.get("rss"):
            return _CALM_SECONDS  # it is dying: this sample says nothing
        self.newest = sample
        self._history.add(sample)
        self._growth.add(sample)
        self._forecast = self._growth.forecast()
        return _PRESSED_SECONDS if self._growth.is_close() else _CALM_SECONDS

    def alarm(self, now: float, needed_seconds: float, *, is_busy: bool) -> Alarm | None:
        """An alarm if the limit will be reached soon and none was raised yet."""
        return self._episodes.alarm(now, self._forecast, needed_seconds, is_busy=is_busy)

    def stop(self) -> None:
        """The trainer is gone: take no more samples."""
        self.next_at = None

    def wait_for_room(self) -> None:
        """The trainer is dead: wait until the kernel has freed its memory.

        In a cgroup that is still full the kernel would kill the keeper next. It sleeps before each
        look: opening a file takes memory, too.
        """
        sample = self.newest or {}
        used, limit = sample.get("cgroup"), sample.get("limit")
        deadline = time.monotonic() + _FREED_SECONDS
        with contextlib.suppress(Exception):  # the trainer's last state is not saved yet
            cgroup = self._sampler.cgroup
            while cgroup and used and limit and used > _FULL * limit:
                if time.monotonic() >= deadline:
                    return
                time.sleep(_FREED_SECONDS / 20)
                usage = cgroup.usage()
                used = None if usage is None else usage.used

    def at_death(self) -> dict[str, Any]:
        """What a post-mortem contains of this."""
        found: dict[str, Any] = {"counters": {}, "memory": []}
        try:
            if self._has_begun:
                death = read_counters(self._sampler.cgroup)
                counters = {"start": self._counted.start, "before": self.before, "death": death}
                found = {"counters": counters, "memory": self._history.recent()}
        except Exception:  # noqa: BLE001  the trainer's last state is not saved yet
            traceback.print_exc()
        return {**found, "children": self.ended()}

    def ended(self) -> list[dict[str, Any]]:
        """The descendants that have ended recently."""
        since = time.time() - _ENDED_SECONDS
        try:
            found = self._family.ended() if self._has_begun else []
            return [each for each in found if each["ended"] >= since]
        except Exception:  # noqa: BLE001  as above
            traceback.print_exc()
            return []
