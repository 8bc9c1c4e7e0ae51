"""The record of a trainer's death, for `holdfast why`.

It is written twice: at once, since what killed the trainer may kill the keeper next, and again when
all is saved and the kernel has reported the exit status.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from holdfast._environment.processes.ended import exit_code, how_it_died
from holdfast._environment.processes.identity import host_name
from holdfast._environment.processes.proc import FairDeadline
from holdfast._environment.processes.tree import parent
from holdfast._keeper.memory_alarm import MemoryWatch
from holdfast._keeper.trainer import Ends
from holdfast._store.commit.write import Policy
from holdfast._store.folder.attempts import write_json

_ASK_SECONDS = 0.6  # for its parent to collect the status: the kernel may report it then
_GONE_SECONDS = 0.05  # after that an older kernel has nothing left to report
_ASK_AGAIN_SECONDS = 0.01


class PostMortem:
    """The record of one death."""

    def __init__(
        self, policy: Policy, ends: Ends, watch: MemoryWatch, signals: Iterable[dict[str, Any]]
    ) -> None:
        self._path = policy.layout.death(policy.attempt, policy.rank)
        self._ends = ends
        self._watch = watch
        # Its parent must collect the status, and may have to wait for a processor first.
        self._heard = FairDeadline(_ASK_SECONDS, lambda: [parent(ends.trainer_pid)])
        self._began = time.monotonic()
        self.status: int | None = None  # as subprocess gives it
        self.how: str | None = None  # in words
        self._record: dict[str, Any] = {
            "time": time.time(),
            "host": host_name(),
            "pid": ends.trainer_pid,
            "rank": policy.rank,
            "attempt": policy.attempt,
            "status": None,
            **watch.at_death(),
            "signals": list(signals),
        }
        self.ask()

    def ask(self) -> bool:
        """Ask the kernel for the exit status; True if it is known, or never will be."""
        is_there = self._is_there()
        if self.status is None:
            dead = (self._ends.pidfd, self._ends.trainer_pid)
            self.status, self.how = exit_code(*dead), how_it_died(*dead)
        if self.status is not None:
            return True
        gone_seconds = time.monotonic() - self._began
        return self._heard.is_over() if is_there else gone_seconds > _GONE_SECONDS

    def _is_there(self) -> bool:
        return Path(f"/proc/{self._ends.trainer_pid}").exists()

    def wait_for_status(self) -> None:
        """Ask until the kernel reports the exit status, for a moment."""
        while not self.ask():
            time.sleep(_ASK_AGAIN_SECONDS)

    def is_as_told(self, left_status: int | None) -> bool:
        """True if the trainer only left with the status that it had been told."""
        if left_status is None:
            return False
        by_signal = 128 - left_status
        return self.status in (None, left_status, by_signal)

    def note(self, **facts: Any) -> None:
        """Add what the keeper knows."""
        self._record |= facts

    def write(self, *, durable: bool = True, **facts: Any) -> None:
        """Write what is known so far."""
        # A process that became another program by exec has said no goodbye either.
        alive = self.status is None and self._is_there()
        self.note(status=self.status, alive=alive, children=self._watch.ended(), **facts)
        with contextlib.suppress(OSError):
            write_json(self._path, self._record, durable=durable)
