"""The trainer's pulse: a thread that shows the keeper the state of the interpreter.

The main thread writes to the control page at a boundary only. Between two boundaries, once a
second, this thread shows that the interpreter runs, whether a person holds the main thread in a
debugger, and which profilers slow it down. While a call holds the GIL the pulse stops, which the
keeper notices too.
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

from holdfast._environment.processes.proc import field, read_bytes
from holdfast._run.saving.debuggers import DebuggerWatch, never_held
from holdfast._store.memory.control import (
    BOUNDARY_NS,
    COMPILES,
    DISTURBANCES,
    DISTURBED,
    PAUSED,
    PULSE_NS,
)

_BEAT_SECONDS = 1.0
_END_SECONDS = 1.0


class Pulse:
    """Beats into the control page until `stop`, for the thread that made it."""

    def __init__(self, words: Any, at_each: Callable[[], None] | None = None) -> None:
        self._words = words
        self._at_each = at_each  # called about once a second
        self._pid = os.getpid()
        self._debuggers = DebuggerWatch()
        self._disturbances = Disturbances()
        self._seen = 0  # the boundary at the last beat
        self._over = allocate_lock()
        self._over.acquire()
        words[PULSE_NS] = time.monotonic_ns()
        thread = threading.Thread(name="holdfast-pulse", daemon=True)
        thread.run = _untraced(self._go_on)  # type: ignore[method-assign]  # of this one thread
        self._thread = never_held(thread)
        thread.start()

    def note(self) -> None:
        """Observe what only the training thread can see of itself; at some boundaries."""
        with contextlib.suppress(Exception):  # an observation must never end a training
            self._debuggers.note()
            self._disturbances.note()

    def stop(self) -> None:
        """End it before the words are released; a forked child has no such thread."""
        if os.getpid() != self._pid or not self._over.locked():
            return
        self._over.release()
        self._thread.join(_END_SECONDS)
        for word in (PULSE_NS, PAUSED, DISTURBED):
            self._words[word] = 0
        if not self._thread.is_alive():
            self._debuggers.close()

    def _go_on(self) -> None:
        self._beat()
        # A bare lock: a debugger or a user may have changed `threading`.
        while not self._over.acquire(timeout=_BEAT_SECONDS):
            if not self._beat():
                return
        self._over.release()

    def _beat(self) -> bool:
        """False when the words are released."""
        words = self._words
        try:
            words[PULSE_NS] = time.monotonic_ns()
            seen, self._seen = self._seen, words[BOUNDARY_NS]
        except ValueError:
            return False
        # A failed observation must not end the pulse.
        with contextlib.suppress(Exception):
            words[PAUSED] = self._debuggers.look(stands=seen == self._seen)
            words[DISTURBED], words[COMPILES] = self._disturbances.look()
        with contextlib.suppress(Exception):
            if self._at_each is not None:
                self._at_each()
        return True


def _untraced(work: Callable[[], None]) -> Callable[[], Any]:
    """Run it unseen by tracers and profilers of all threads.

    `threading.settrace` acts right before `run`, and would see any Python function there. So only
    built-in functions turn it off.
    """
    turn_off = functools.partial(sys.settrace, None), functools.partial(sys.setprofile, None)
    acts: tuple[Callable[[], Any], ...] = (*turn_off, work)
    calls: Any = map(operator.call, acts)
    return functools.partial(collections.deque, calls, 0)


# -- When memory runs out, the kernel is to end the trainer, not its keeper ------------------------
# A trainer resumes from what its keeper saves; without the keeper, snapshots in memory are lost.
# Any process may raise its own OOM score, but not lower it: so the trainer raises its own.


_SCORE = Path("/proc/self/oom_score_adj")
_MORE = 100  # thousandths of all memory that the trainer seems to use more
_MOST = 1000


class OomScore:
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
        """Restore it, unless it was set by other code since."""
        before, self._before = self._before, None
        if before is not None:
            with contextlib.suppress(OSError, ValueError):
                if int(_SCORE.read_text()) == self._raised:
                    _SCORE.write_text(str(before))


# -- Tracers, profilers and recorders, which make a training slower or larger ----------------------
# Nothing is imported for this: a module that is not loaded does not disturb. Only a thread itself
# sees its tracer, so the training thread notes it at boundaries.


_BITS = {name: 1 << number for number, name in enumerate(DISTURBANCES)}
_DEBUGGERS = ("bdb", "pdb", "pudb", "pydevd", "_pydevd_bundle", "_pydevd_frame_eval", "debugpy")
_WRITERS = ("tensorboard.summary.writer.event_file_writer", "tensorboardX.event_file_writer")
# Reading a file releases the GIL, and taking it back costs a busy trainer time.
_FILE_EVERY = 5  # looks
_TOOLS = 6  # the tools of `sys.monitoring`


class Disturbances:
    """Finds them; `note` runs in the training thread, `look` in any other."""

    def __init__(self) -> None:
        self._noted = 0
        self._looks = 0
        self._is_traced = False
        self._torch: Any = None
        self.note()

    def note(self) -> None:
        trace, profile = sys.gettrace(), sys.getprofile()
        self._noted = 0 if trace is None else _BITS[_name_tracer(trace, False)]
        if profile is not None:
            self._noted |= _BITS[_name_tracer(profile, True)]
        if self._torch is None and "torch" in sys.modules:
            # Not in the other thread: torch may be half imported there.
            from holdfast.torch.profiled import Profiled

            self._torch = Profiled()
        if self._torch is not None:
            self._torch.note()

    def look(self) -> tuple[int, int]:
        """The bits of what disturbs now, and the number of compilations so far."""
        if self._looks % _FILE_EVERY == 0:  # is gdb or strace attached?
            self._is_traced = bool(field(read_bytes("/proc/self/status") or b"", b"TracerPid:"))
        self._looks += 1
        of_torch, compiles = ([], 0) if self._torch is None else self._torch.look()
        memory = sys.modules.get("_tracemalloc") or sys.modules.get("tracemalloc")
        found = {*_monitors(), *of_torch}
        if any(name in sys.modules for name in _WRITERS) and any(
            type(thread).__module__ in _WRITERS for thread in threading.enumerate()
        ):
            found.add("a TensorBoard writer")
        if memory is not None and memory.is_tracing():
            found.add("tracemalloc")
        if self._is_traced:
            found.add("a tracer")
        return sum(_BITS[name] for name in found) | self._noted, compiles


def _name_tracer(trace: Any, profiles: bool) -> str:
    """By the module of a function or of a callable object."""
    root = str(getattr(trace, "__module__", None) or type(trace).__module__).partition(".")[0]
    if profiles:
        return "cProfile" if root in ("cProfile", "_lsprof") else "sys.setprofile"
    if root in _DEBUGGERS:
        return "a debugger"
    return "coverage" if root == "coverage" else "sys.settrace"


def _monitors() -> list[str]:
    """From Python 3.12 on, debuggers and profilers need no tracer."""
    monitoring: Any = getattr(sys, "monitoring", None)
    tools = [] if monitoring is None else map(monitoring.get_tool, range(_TOOLS))
    return [
        _name_tool(number, tool, monitoring.DEBUGGER_ID)
        for number, tool in enumerate(tools)
        if tool is not None
    ]


def _name_tool(number: int, tool: str, debuggers: int) -> str:
    if tool == "cProfile":
        return "cProfile"
    if tool.startswith("coverage"):
        return "coverage"
    return "a debugger" if number == debuggers else "a profiler"
