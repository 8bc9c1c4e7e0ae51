"""An inspection of the command's processes, by a process of its own.

Reading about a process that waits for a dead file system may block, too. The leader must not
block: it receives the signals. So it starts a process for it, and takes what comes in time.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._environment.processes.proc import FairDeadline

_LONGEST_SECONDS = 15.0  # less what it waits for a processor
_PROGRAM = """\
import sys
at = [i for i, p in enumerate(sys.path) if p.endswith("site-packages")]
sys.path.insert(at[0] if at else len(sys.path), {place!r})
from holdfast._supervise.inspect import inspect_and_write
inspect_and_write({pid}, {file})
"""


class Inspection:
    def __init__(self, pid: int) -> None:
        """OSError if no process can be started."""
        self._file = os.memfd_create("holdfast-look", os.MFD_CLOEXEC)
        place = str(Path(__file__).parents[2])
        # Without the variables of a rank: it must not count as one that was left behind.
        ranks = variables.of_ranks()
        environment = variables.child_environment()
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-c"),
                    _PROGRAM.format(place=place, pid=pid, file=self._file),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: value for name, value in environment.items() if name not in ranks},
                start_new_session=True,
                pass_fds=[self._file],
            )
        except OSError:
            os.close(self._file)
            raise
        self.pid = self._process.pid
        self._deadline = FairDeadline(_LONGEST_SECONDS, lambda: [self.pid])

    @property
    def is_done(self) -> bool:
        """Whether there is nothing to wait for any longer."""
        return self._process.poll() is not None or self._deadline.is_over()

    def take(self) -> dict[str, Any] | None:
        """{"look", "activity", "cause", "sentence", …}; None if there is none in time."""
        with contextlib.suppress(OSError, ValueError):
            if self._process.poll() is not None:
                found = json.loads(Path(f"/proc/self/fd/{self._file}").read_bytes())
                return found if isinstance(found, dict) else None
        return None

    def close(self) -> None:
        """Without a wait: it is reaped later, like all other children."""
        with contextlib.suppress(OSError):
            if self._process.poll() is None:
                self._process.kill()
        os.close(self._file)


def inspect_and_write(pid: int, file: int) -> None:
    """The whole work of the process that was started for it."""
    from holdfast._diagnose.hangs.explain import explain
    from holdfast._environment.processes.activity import activity_of
    from holdfast._environment.processes.inspect import Looker

    look = Looker(pid).look()
    found = explain({"looks": [look]})
    record = {
        "look": look,
        "activity": activity_of(look).name,
        "cause": found.cause.value,
        "sentence": found.sentence,
        "evidence": list(found.evidence),
        "advice": list(found.advice),
    }
    os.write(file, json.dumps(record).encode())
