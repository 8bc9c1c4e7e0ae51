"""Questions that may never be answered, put to a small program that can be left behind.

A dead file system holds whoever touches it, even against SIGKILL, and a GPU that has failed does
the same. So a process of its own asks; one that has no answer in time is killed and forgotten.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._environment.processes.proc import waits_of

_MOST_BYTES = 1 << 16
_MOST_WAITING_SECONDS = 60.0
_LOOK_SECONDS = 0.2
_FOLDER = Path(__file__).parent
# They import nothing of holdfast, and start in a moment.
PLACE, SPEED, GPUS, PACKAGES, STAND_STILL = (
    _FOLDER / f"{name}.py"
    for name in ("tell_place", "tell_speed", "tell_gpus", "tell_packages", "stand_still")
)


class Question:
    """Asked as soon as it is made, so that several are answered at the same time."""

    def __init__(self, program: Path, *words: str, python: Sequence[str] = ()) -> None:
        # Of the user's own Python all is wanted that it sees; of ours nothing.
        command = [*(python or (sys.executable, "-I", "-S")), str(program), *words]
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError, ValueError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=variables.child_environment(),
            )

    @property
    def pid(self) -> int | None:
        """Of the program, until its answer is had."""
        return None if self._process is None else self._process.pid

    def answer(self, deadline: float) -> dict[str, Any] | None:
        """The last line that it says, by the monotonic clock; None if it says none until then."""
        process = self._process
        if process is None:
            return None
        assert process.stdout is not None
        try:
            _wait(process, deadline)
            # A few lines: they fit into the pipe, and whoever is late may have begun to answer.
            if process.returncode is None:
                os.set_blocking(process.stdout.fileno(), False)
            said = os.read(process.stdout.fileno(), _MOST_BYTES)
            found = json.loads(said.rpartition(b"\n")[0].rpartition(b"\n")[2])
        except (OSError, ValueError, AttributeError):  # Windows has no such pipes
            return None
        finally:
            self.drop()
        return found if isinstance(found, dict) else None

    def drop(self) -> None:
        """End it if it can be ended; never wait for it for long."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdout is not None:
            process.stdout.close()
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            if process.returncode is None:
                # It is left to the system. Python would complain of it when we end.
                process.returncode = -9


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    """Until it has ended or the time is over, less what it has waited for a processor.

    On a crowded machine a question is slow to be asked: that says nothing of who is asked.
    """
    while process.poll() is None:
        waited = max(waits_of([process.pid]).values(), default=0.0)
        left = deadline + min(waited, _MOST_WAITING_SECONDS) - time.monotonic()
        if left <= 0:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(min(left, _LOOK_SECONDS))
