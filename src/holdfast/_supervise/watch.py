"""The command observed from outside: memory, the OOM killer, the ends of its processes.

No error in here may end the supervision: a record without these is still a record.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast._environment.processes.cgroup import Counted, MemoryCgroup
    from holdfast._environment.processes.ended import Descendants
    from holdfast._environment.processes.memory_growth import MemoryHistory
    from holdfast._environment.processes.memory_sample import Sampler

_BEGIN_SECONDS = 0.02  # a command that ends sooner is not worth the imports
_HURRY_SECONDS = 0.1
_HURRY_FOR_SECONDS = 3.0  # after the failure of a process


class CommandWatch:
    def __init__(self, child: int, me: int, is_ours: Callable[[int], bool]) -> None:
        self._child = child
        self._is_ours = is_ours  # not part of the command
        self._me = me
        self._next = time.monotonic() + _BEGIN_SECONDS
        self._hurry_until = 0.0
        self._is_on = False
        self._is_broken = False
        self._sampler: Sampler
        self._history: MemoryHistory
        self._descendants: Descendants | None = None
        self._cgroup: MemoryCgroup | None = None
        self._counted: Counted | None = None
        self._ends_seen = 0
        self._reaped: dict[int, int] = {}

    def fileno(self) -> int:
        """Ready when one of them has ended; -1 if there is no such descriptor."""
        return -1 if self._descendants is None else self._descendants.fileno()

    def next_poll_seconds(self) -> float | None:
        return None if self._is_broken else max(0.0, self._next - time.monotonic())

    def poll(self, *, is_due: bool = False) -> None:
        now = time.monotonic()
        if self._is_broken or (now < self._next and not is_due):
            return
        self._is_broken = True  # unless all goes well
        with contextlib.suppress(Exception):  # see the top
            if not self._is_on:
                self._begin()
            self._sample()
            pause = self._sampler.pause_seconds(now < self._hurry_until)
            self._next = time.monotonic() + pause
            self._is_broken = False

    def observe_ends(self) -> None:
        """A process has ended: the order of ends is known only if they are read at once."""
        with contextlib.suppress(Exception):  # see the top
            if self._descendants is not None:
                ended = self._descendants.ended()
                new, self._ends_seen = ended[self._ends_seen :], len(ended)
                failed = [each for each in new if self._is_told(each) and each["status"] != 0]
                if failed:
                    self._add_counters(failed)
                    self._hurry_until = time.monotonic() + _HURRY_FOR_SECONDS
                    self._next = min(self._next, time.monotonic() + _HURRY_SECONDS)

    def _add_counters(self, failed: list[dict[str, Any]]) -> None:
        """What the OOM killer had done by then; the command itself may end much later."""
        from holdfast._environment.processes.cgroup import read_counters

        if self._counted is None:
            return
        known = {"start": self._counted.start, "before": self._counted.before}
        for each in failed:
            each["counters"] = {**known, "death": read_counters(self._cgroup)}

    def observe_reaped(self, pid: int, status: int) -> None:
        """The status of our own child; some systems report no status of other processes."""
        self._reaped[pid] = status

    def end(self, status: int) -> dict[str, Any]:
        """All that was observed of the command, which has ended."""
        counters: dict[str, Any] = dict.fromkeys(("start", "before", "death"))
        seen: dict[str, Any] = {"counters": counters, "memory": [], "processes": []}
        with contextlib.suppress(Exception):  # see the top
            if status != 0 or self._is_on:
                if not self._is_on:
                    self._begin()
                from holdfast._environment.processes.cgroup import read_counters

                counters["death"] = read_counters(self._cgroup)
            if self._counted is not None:
                counters |= {"start": self._counted.start, "before": self._counted.before}
            if self._descendants is not None:
                seen["processes"] = [e for e in self._descendants.ended() if self._is_told(e)]
                for each in seen["processes"]:
                    if each.get("status") is None:
                        each["status"] = self._reaped.get(each["pid"])
                seen["memory"] = self._history.recent()
                self._descendants.close()
                self._descendants = None
        return seen

    def _begin(self) -> None:
        from holdfast._environment.processes.cgroup import MemoryCgroup
        from holdfast._environment.processes.ended import Descendants
        from holdfast._environment.processes.memory_growth import MemoryHistory
        from holdfast._environment.processes.memory_sample import Sampler

        self._sampler = Sampler(self._child)
        self._history = MemoryHistory()
        self._descendants = Descendants(self._me)
        # One that has ended by now was most likely in our own cgroup.
        self._sampler.cgroup = self._sampler.cgroup or MemoryCgroup.find(self._me)
        self._cgroup = self._sampler.cgroup
        self._is_on = True

    def _sample(self) -> None:
        from holdfast._environment.processes.cgroup import Counted, MemoryCgroup, read_counters

        assert self._descendants is not None
        found = MemoryCgroup.find(self._child)
        if found is not None and (self._cgroup is None or found.path != self._cgroup.path):
            # It was moved to another cgroup, by itself or by a scheduler.
            self._cgroup = self._sampler.cgroup = found
            self._counted = None
        counters = read_counters(self._cgroup)
        if self._counted is None:
            self._counted = Counted(counters)
        self._counted.add(counters, time.monotonic())
        self._history.add(self._sampler.take())
        self._descendants.look()
        self.observe_ends()

    def _is_told(self, ended: dict[str, Any]) -> bool:
        return not self._is_ours(ended["pid"]) and not self._is_ours(ended["ppid"])
