"""A training that lets its disk keep up, however slow that is."""

from __future__ import annotations

import time
from pathlib import Path


def wait_for_due(folder: Path, completed: int, every: int, seconds: float) -> None:
    """Wait within a step, for so long at most, until the checkpoint that was due last is there.

    One that found no slot free is made at a later boundary, so the step must end even without it.
    """
    due = completed // every * every
    deadline = time.monotonic() + seconds
    while due and time.monotonic() < deadline:
        names = [path.name for path in (folder / "checkpoints").glob("step-*")]
        if max((int(name.split("-")[1]) for name in names), default=0) >= due:
            return
        time.sleep(0.002)
