"""What a keeper knows of its trainer's death, for whoever asks why it died.

It is written twice: at once, since whatever ends trainers may end keepers next, and again when
all is saved and the system has said how the process ended.
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
from holdfast._store.commit.checkpoint import Policy
from holdfast._store.folder.attempts import write_json

_ASK_SECONDS = 0.6  # for its parent to hear of it: until then the system may not say
_GONE_SECONDS = 0.05  # and once it has heard, an older kernel has nothing left to say
_ASK_AGAIN_SECONDS = 0.01


class PostMortem:
    """The record of one death."""

    def __init__(
        self, policy: Policy, ends: Ends, watch: MemoryWatch, signals: Iterable[dict[str, Any]]
    ) -> None:
        self._path = policy.layout.death(policy.attempt, policy.rank)
        self._ends = ends
        self._watch = watch
        # Its parent must hear of it, and may have to wait for a processor first.
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
        """Ask the system how it ended; whether it has said so, or never will."""
        is_there = self._is_there()
        if self.status is None:
            dead = (self._ends.pidfd, self._ends.trainer_pid)
            self.status, self.how = exit_code(*dead), how_it_died(*dead)
        if self.status is not None:
            return True
        return self._heard.is_over() if is_there else self._is_gone_for_long()

    def _is_gone_for_long(self) -> bool:
        return time.monotonic() - self._began > _GONE_SECONDS

    def _is_there(self) -> bool:
        return Path(f"/proc/{self._ends.trainer_pid}").exists()

    def wait_for_status(self) -> None:
        """Ask until the system says how it ended, for a moment."""
        while not self.ask():
            time.sleep(_ASK_AGAIN_SECONDS)

    def is_as_told(self, left_status: int | None) -> bool:
        """Whether the trainer only did what it had been told to: leave with this status."""
        if left_status is None:
            return False
        return self.status in (None, left_status, 128 - left_status)  # the last: by the signal

    def note(self, **facts: Any) -> None:
        """Add what the keeper knows."""
        self._record |= facts

    def write(self, *, durable: bool = True, **facts: Any) -> None:
        """Write what is known by now."""
        # What has become another program by exec has said no goodbye either.
        alive = self.status is None and self._is_there()
        self.note(status=self.status, alive=alive, children=self._watch.ended(), **facts)
        with contextlib.suppress(OSError):
            write_json(self._path, self._record, durable=durable)
