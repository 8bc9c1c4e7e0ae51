"""A training that a test moves by hand, with the real progress line.

The scripts of the tests import it: `training` is what the line shows, and `wait(name)` stays
where it is until the test makes the file of that name.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from holdfast._run.progress.line import Progress, Standing

gates = Path(sys.argv[1])


class Training:
    """Where it stands is set, not trained."""

    def __init__(self) -> None:
        self.standing = Standing(
            step=1240, steps=5000, epoch=2, epochs=10, metrics={"loss": 0.2312}, disk_step=1200
        )

    def look(self) -> Standing:
        return self.standing

    def move(self, **changes: Any) -> None:
        changes = {"step": self.standing.step + 1, **changes}
        self.standing = dataclasses.replace(self.standing, **changes)


training = Training()
progress = Progress(training.look)


def wait(name: str, seconds: float = 60.0) -> None:
    """Let the test know that we are here, and wait for its answer."""
    (gates / f"{name}.reached").touch()
    deadline = time.monotonic() + seconds
    while not (gates / name).exists() and time.monotonic() < deadline:
        time.sleep(0.005)
