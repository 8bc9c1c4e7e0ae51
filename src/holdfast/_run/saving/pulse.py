"""The trainer's second beat: a thread that tells the keeper what the main thread cannot.

At a boundary the main thread says that it is well. Between two of them it may be anywhere, so
once a second this thread shows that the interpreter still runs, whether a person holds the main
thread in a debugger, and what makes it slower than it is. When a call holds the GIL, this beat
stops too, and that tells the keeper as well.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
import os
import sys
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast._run.saving.debuggers import Holds
from holdfast._run.saving.profilers import Disturbances
from holdfast._run.saving.unheld import never_held
from holdfast._store.memory.control import BOUNDARY_NS, COMPILES, DISTURBED, PAUSED, PULSE_NS

_BEAT_SECONDS = 1.0
_END_SECONDS = 1.0


class Pulse:
    """Beats into the control page from its making until `stop`, for the thread that made it."""

    def __init__(self, words: Any, at_each: Callable[[], None] | None = None) -> None:
        self._words = words
        self._at_each = at_each  # what else is to be done about once a second
        self._pid = os.getpid()
        self._holds = Holds()
        self._disturbances = Disturbances()
        self._seen = 0  # the boundary at the last beat
        self._over = allocate_lock()
        self._over.acquire()
        words[PULSE_NS] = time.monotonic_ns()
        thread = threading.Thread(name="holdfast-pulse", daemon=True)
        thread.run = _untraced(self._go_on)  # type: ignore[method-assign]
        self._thread = never_held(thread)
        thread.start()

    def note(self) -> None:
        """What only the thread that trains can see of itself; at a boundary now and then."""
        with contextlib.suppress(Exception):  # nothing that is seen here is worth a training
            self._holds.note()
            self._disturbances.note()

    def stop(self) -> None:
        """End it, before the words go; a forked child has no such thread."""
        if os.getpid() != self._pid or not self._over.locked():
            return
        self._over.release()
        self._thread.join(_END_SECONDS)
        for word in (PULSE_NS, PAUSED, DISTURBED):
            self._words[word] = 0
        if not self._thread.is_alive():
            self._holds.close()

    def _go_on(self) -> None:
        self._beat()
        # A bare lock and nothing of `threading`, which a debugger or a user may have changed.
        while not self._over.acquire(timeout=_BEAT_SECONDS):
            if not self._beat():
                return
        self._over.release()

    def _beat(self) -> bool:
        """False when the words are released: there is nobody left to beat for."""
        words = self._words
        try:
            words[PULSE_NS] = time.monotonic_ns()
            seen, self._seen = self._seen, words[BOUNDARY_NS]
        except ValueError:
            return False
        # What cannot be seen must not end the beat.
        with contextlib.suppress(Exception):
            words[PAUSED] = self._holds.look(stands=seen == self._seen)
            words[DISTURBED], words[COMPILES] = self._disturbances.look()
        with contextlib.suppress(Exception):
            if self._at_each is not None:
                self._at_each()
        return True


def _untraced(work: Callable[[], None]) -> Callable[[], Any]:
    """Run it where neither a tracer nor a profiler of all threads sees a line of it.

    `threading.settrace` acts right before `run`, and would be told of any Python function there.
    So what turns it off is made of built-in functions only.
    """
    turn_off = functools.partial(sys.settrace, None), functools.partial(sys.setprofile, None)
    calls: Any = map(operator.call, (*turn_off, work))  # type: ignore[arg-type]
    return functools.partial(collections.deque, calls, 0)


# -- When memory runs out, the kernel is to end the trainer and not its keeper ---------------------
# A trainer can be started again from what its keeper saves; without the keeper, what was in memory
# is lost. Anybody may raise the score by which the kernel chooses, so the trainer's own is raised;
# nobody's is lowered.


_SCORE = Path("/proc/self/oom_score_adj")
_MORE = 100  # thousandths of all memory: the trainer is chosen as if it used that much more
_MOST = 1000


class Sacrifice:
    """The trainer's score, while it has a keeper."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._raised = 0

    def offer(self) -> None:
        """Raise the score of this process, and of those that it starts from now on."""
        if self._before is None:
            with contextlib.suppress(OSError, ValueError):
                before = int(_SCORE.read_text())
                self._raised = min(before + _MORE, _MOST)
                _SCORE.write_text(str(self._raised))
                self._before = before

    def take_back(self) -> None:
        """As it was, unless somebody else has set it since."""
        before, self._before = self._before, None
        if before is not None:
            with contextlib.suppress(OSError, ValueError):
                if int(_SCORE.read_text()) == self._raised:
                    _SCORE.write_text(str(before))
