"""The words that a trainer shares with its keeper, read from outside."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

from holdfast._store.format.image import PAGE
from holdfast._store.memory.control import (
    DEBUGGERS,
    DISTURBANCES,
    DISTURBED,
    PAUSED,
    PULSE_NS,
    WORDS,
)
from tests.support import wait_until


class SharedWords:
    """What a process that has an open run tells of itself."""

    def __init__(self, pid: int) -> None:
        path = wait_until(lambda: _find(pid), what="the control page")
        with path.open("rb") as page:
            self._mapped = mmap.mmap(page.fileno(), PAGE, prot=mmap.PROT_READ)
        self.words = memoryview(self._mapped)[: 8 * WORDS].cast("Q")

    @property
    def paused(self) -> str:
        return DEBUGGERS[self.words[PAUSED]]

    @property
    def disturbed(self) -> set[str]:
        bits = self.words[DISTURBED]
        return {name for number, name in enumerate(DISTURBANCES) if bits >> number & 1}

    @property
    def pulse_age(self) -> float:
        return (time.monotonic_ns() - self.words[PULSE_NS]) / 1e9

    def wait_for_beats(self, count: int = 1, seconds: float = 30.0) -> None:
        """Until so many more beats have come."""
        for _ in range(count):
            last = self.words[PULSE_NS]
            wait_until(lambda last=last: self.words[PULSE_NS] != last, seconds, "a beat")

    def wait_until_paused(self, by: str, seconds: float = 30.0) -> None:
        wait_until(lambda: self.paused == by, seconds, f"a pause by {by or 'nobody'}")


def _find(pid: int) -> Path | None:
    folder = Path(f"/proc/{pid}/fd")
    for path in folder.iterdir():
        try:
            if str(path.readlink()).startswith("/memfd:holdfast-control"):
                return path
        except OSError:
            continue
    return None
