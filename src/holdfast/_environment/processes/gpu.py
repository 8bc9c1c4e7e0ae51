"""Memory of the GPUs, by NVIDIA's library.

The library takes 19 MB in the process that loads it, and a failed GPU can block or crash that
process. So a separate program asks at intervals, and `memory` returns its last answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

from holdfast._environment import variables

_PROGRAM = Path(__file__).with_name("nvml.py")
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
_FIRST_SECONDS = 5.0  # a single sample does not wait for an answer
_PAUSE_SECONDS = 30.0
_BUDGET = 0.001  # of one core
_PATIENCE_SECONDS = 20.0
_STALE_SECONDS = 300.0
_MOST_PIDS = 64

# [index, used, total, used by the given processes or None, percent busy, watts, celsius]
Memory = list[list[int | None]]


class Gpus:
    """All GPUs of the driver. A question never blocks."""

    def __init__(self, program: Path = _PROGRAM, drivers: Collection[str] = _DRIVERS) -> None:
        self._program = program
        # Without a driver the program is not started.
        self._is_there = program.exists() and any(Path(each).exists() for each in drivers)
        self._next_at = time.monotonic() + _FIRST_SECONDS
        self._asked: tuple[int, int, float] | None = None  # pid, pipe of its answer, start time
        self._newest: tuple[float, Memory] | None = None

    def memory(self, pids: Collection[int]) -> Memory | None:
        """The last answer; None without a GPU that answers."""
        if not self._is_there:
            return None
        now = time.monotonic()
        if self._asked is not None:
            self._receive(now)
        elif now >= self._next_at:
            self._ask(now, list(pids)[:_MOST_PIDS])
        if self._newest is None or now - self._newest[0] > _STALE_SECONDS:
            return None
        return self._newest[1]

    def close(self) -> None:
        if self._asked is not None:
            pid, answer, _ = self._asked
            self._asked, self._is_there = None, False
            os.close(answer)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)

    def _ask(self, now: float, pids: list[int]) -> None:
        self._next_at = now + _PAUSE_SECONDS
        command = [sys.executable, "-I", "-S", str(self._program), *map(str, pids)]
        answer, theirs = os.pipe()
        try:
            pid = os.posix_spawn(
                command[0],
                command,
                variables.whole(),
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, theirs, 1),
                    (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
                ],
                setsigmask=[],
            )
        except (OSError, ValueError, NotImplementedError):
            os.close(answer)
            self._is_there = False
            return
        finally:
            os.close(theirs)
        os.set_blocking(answer, False)
        self._asked = pid, answer, now

    def _receive(self, now: float) -> None:
        assert self._asked is not None
        pid, answer, since = self._asked
        cost = 0.0
        with contextlib.suppress(ChildProcessError):  # `holdfast run` reaps all children
            ended, _, used = os.wait4(pid, os.WNOHANG)
            if not ended:
                if now - since > _PATIENCE_SECONDS:
                    # A program that a GPU blocks may survive this. Then none is started again.
                    os.kill(pid, signal.SIGKILL)
                return
            cost = used.ru_utime + used.ru_stime
        self._asked = None
        self._next_at = max(self._next_at, now + cost / _BUDGET)
        try:
            found = json.loads(os.read(answer, 1 << 16))
        except (OSError, ValueError):
            return  # it was killed, or has crashed
        finally:
            os.close(answer)
        if found is None:
            self._is_there = False
        else:
            self._newest = now, found
