"""The duties of process 1, for a trainer that is its container's first process.

A signal that process 1 does not handle does nothing, where any other process would die: after its
run is closed, a script would ignore SIGTERM until it is killed. And orphans become its children,
which it must reap.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

from holdfast._text import say

_LOOK_SECONDS = 2.0
_MANY = 200  # zombies count towards a limit of processes
# Signals that end a process by default, and that people and systems send.
_DEADLY = ("SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")
_PROC = Path("/proc")


def is_first_process() -> bool:
    """True for process 1 of its container."""
    return os.getpid() == 1


def die_by_signals() -> None:
    """Let unhandled signals end this process, as they would end any other."""
    for name in _DEADLY:
        number = getattr(signal, name)
        with contextlib.suppress(ValueError, OSError):  # only the main thread may
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _die)


def _die(number: int, _: object) -> None:
    if os.getpid() == 1:
        os._exit(128 + number)
    # A forked child has inherited this handler, and can die of the signal.
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class Reaper:
    """Reaps orphans that have ended, but no child that this process has started itself.

    The code that started a child needs its status. An orphan was seen below another process
    before: that tells them apart.
    """

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._others: set[tuple[int, int]] = set()  # children of other processes, as (pid, start)
        self._has_told = False
        self._is_over = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._go_on, name="holdfast-reaper", daemon=True).start()

    def stop(self) -> None:
        self._is_over.set()

    def _go_on(self) -> None:
        while not self._is_over.wait(_LOOK_SECONDS):
            self.look()

    def look(self) -> list[int]:
        """Reap the orphans that have ended; returns their pids."""
        seen: set[tuple[int, int]] = set()
        ended: list[tuple[int, int]] = []
        for pid, parent, state, start in _processes(self._proc):
            if parent != os.getpid():
                seen.add((pid, start))
            elif state == "Z":
                ended.append((pid, start))
            elif (pid, start) in self._others:
                seen.add((pid, start))  # an orphan that still runs
        reaped = [pid for pid, start in ended if (pid, start) in self._others and _reap(pid)]
        self._others = seen
        if len(ended) - len(reaped) > _MANY and not self._has_told:
            self._has_told = True
            say(
                f"{len(ended)} processes have ended and were not reaped: this one is the "
                "container's first process, and cannot tell whose children they are.\n"
                "Start it as: holdfast run -- python …"
            )
        return reaped


def _reap(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    return False


def _processes(proc: Path) -> list[tuple[int, int, str, int]]:
    found = []
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            # The name comes first, in brackets, and may contain any character.
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            found.append((int(entry.name), int(fields[1]), fields[0], int(fields[19])))
    return found
