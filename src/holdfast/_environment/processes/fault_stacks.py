"""The Python stacks of processes, which they write themselves at a signal.

Used where py-spy is missing or forbidden. The trainer has registered faulthandler for a signal (see
`_run/signals/stack_dump.py`), and its forked workers inherit that. All write into one file in
memory, whose name has the number of the signal. A process that does not have that file open gets no
signal: it has no handler, and would die.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Sequence

from holdfast._environment.processes.proc import FairDeadline
from holdfast._environment.processes.pyspy import MOST_FRAMES, Dump, PythonThread
from holdfast._environment.processes.threads import STACKS_FILE, catches

_PAUSE_SECONDS = 0.01
_QUIET_LOOKS = 4  # it writes line by line, without a mark at the end
_SPEAKS = frozenset("RSD")  # a process in another state would answer later
_HEAD = re.compile(
    r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?+) in (.*)$')


class FaultStacks:
    """Asks processes for their stacks through the file that they share with us."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.number = _signal_of(descriptor)

    def dump(
        self,
        states: Sequence[tuple[int, str]],
        seconds: float,
        get_on: Callable[[], None] = lambda: None,
    ) -> dict[int, Dump]:
        """The stacks of each (pid, state), one after the other, all within that time.

        The wait for a processor does not count.
        """
        deadline = time.monotonic() + seconds
        found: dict[int, Dump] = {}
        for pid, state in states:
            get_on()
            if state not in _SPEAKS or not self._may_ask(pid):
                found[pid] = Dump(error=f"process {pid} cannot be asked for its stacks")
            elif (left := deadline - time.monotonic()) > 0:
                asked = time.monotonic()
                share = min(left, max(0.2, seconds / 2))
                found[pid] = self._ask(pid, share)
                # The wait of one is not taken from the others.
                deadline += max(0.0, time.monotonic() - asked - share)
        return found

    def _may_ask(self, pid: int) -> bool:
        if self.number is None or not catches(pid, self.number):
            return False
        with contextlib.suppress(OSError):
            # All have inherited it under the same number. A Path would be slower.
            theirs = os.stat(f"/proc/{pid}/fd/{self._descriptor}")  # noqa: PTH116  quicker
            return os.path.samestat(theirs, os.fstat(self._descriptor))
        return False

    def _ask(self, pid: int, seconds: float) -> Dump:
        assert self.number is not None
        deadline = FairDeadline(seconds, lambda: [pid])
        try:
            os.ftruncate(self._descriptor, 0)
            os.kill(pid, self.number)
        except OSError as error:
            return Dump(error=f"process {pid} cannot be asked for its stacks: {error.strerror}")
        size, quiet = 0, 0
        while quiet < _QUIET_LOOKS and not deadline.is_over():
            time.sleep(_PAUSE_SECONDS)
            now = os.fstat(self._descriptor).st_size
            quiet = quiet + 1 if now and now == size else 0
            size = now
        threads = parse_stacks(os.pread(self._descriptor, size, 0).decode(errors="replace"), pid)
        if not threads:
            return Dump(error=f"process {pid} has not answered within {seconds:.1f} s")
        return Dump(threads)


def parse_stacks(text: str, pid: int) -> list[PythonThread]:
    """The output of faulthandler. A complete list ends with the main thread."""
    threads: list[PythonThread] = []
    is_whole = True
    for line in text.splitlines():
        if head := _HEAD.match(line):
            threads.append(PythonThread(None, head[2], None, [], int(head[1], 16)))
        elif (frame := _FRAME.match(line)) and threads:
            if len(threads[-1].frames) < MOST_FRAMES:
                number = int(frame[2]) if frame[2].isdigit() else 0
                threads[-1].frames.append({"file": frame[1], "line": number, "name": frame[3]})
        elif line == "...":  # it writes at most a hundred threads
            is_whole = False
    if threads and is_whole:
        threads[-1].tid = pid
        threads[-1].name = threads[-1].name or "MainThread"
    return threads


def _signal_of(descriptor: int) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        name = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115  quicker than a Path
        return int(name.partition(STACKS_FILE)[2].split()[0])
    return None
