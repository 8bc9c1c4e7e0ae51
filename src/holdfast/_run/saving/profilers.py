"""What makes a training slower or larger than it is by itself: tracers, profilers, recorders.

Nothing is imported for this: what is not loaded does not disturb. A tracer of one thread is seen
by that thread alone, so the one that trains notes it at its boundaries.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from holdfast._environment.processes.proc import field, read_bytes
from holdfast._store.memory.control import DISTURBANCES

_BITS = {name: 1 << number for number, name in enumerate(DISTURBANCES)}
_DEBUGGERS = ("bdb", "pdb", "pudb", "pydevd", "_pydevd_bundle", "_pydevd_frame_eval", "debugpy")
_WRITERS = ("tensorboard.summary.writer.event_file_writer", "tensorboardX.event_file_writer")
# Reading a file gives up the GIL, and each time it is taken again a busy trainer pays for it.
_FILE_EVERY = 5  # looks
_TOOLS = 6  # as many as `sys.monitoring` has room for


class Disturbances:
    """Looks for all of them; `note` in the thread that trains, `look` in any other."""

    def __init__(self) -> None:
        self._noted = 0
        self._looks = 0
        self._is_traced = False
        self._torch: Any = None
        self.note()

    def note(self) -> None:
        trace, profile = sys.gettrace(), sys.getprofile()
        noted = 0
        if trace is not None:
            noted |= _BITS[_name_tracer(trace)]
        if profile is not None:
            noted |= _BITS[_name_profiler(profile)]
        self._noted = noted
        if self._torch is None and "torch" in sys.modules:
            # Not in the other thread, which would find a torch that is half imported.
            from holdfast.torch.profiled import Profiled

            self._torch = Profiled()
        if self._torch is not None:
            self._torch.note()

    def look(self) -> tuple[int, int]:
        """The bits of what disturbs now, and how many pieces of code were compiled so far."""
        found = self._noted
        for name in _monitors():
            found |= _BITS[name]
        if _has_writer():
            found |= _BITS["a TensorBoard writer"]
        if _traces_memory():
            found |= _BITS["tracemalloc"]
        if self._looks % _FILE_EVERY == 0:
            self._is_traced = _is_traced()
        self._looks += 1
        if self._is_traced:
            found |= _BITS["a tracer"]
        if self._torch is None:
            return found, 0
        names, compiles = self._torch.look()
        for name in names:
            found |= _BITS[name]
        return found, compiles


def _home(tool: Any) -> str:
    """The module of a function, or of what is called instead of one."""
    module = getattr(tool, "__module__", None) or type(tool).__module__
    return str(module)


def _name_tracer(trace: Any) -> str:
    root = _home(trace).partition(".")[0]
    if root in _DEBUGGERS:
        return "a debugger"
    return "coverage" if root == "coverage" else "sys.settrace"


def _name_profiler(profile: Any) -> str:
    return "cProfile" if _home(profile) in ("cProfile", "_lsprof") else "sys.setprofile"


def _monitors() -> list[str]:
    """From Python 3.12 on, debuggers and profilers need no tracer."""
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is None:
        return []
    found = []
    for number in range(_TOOLS):
        tool = monitoring.get_tool(number)
        if tool is not None:
            found.append(_name_tool(number, tool, monitoring.DEBUGGER_ID))
    return found


def _name_tool(number: int, tool: str, debuggers: int) -> str:
    if tool == "cProfile":
        return "cProfile"
    if tool.startswith("coverage"):
        return "coverage"
    return "a debugger" if number == debuggers else "a profiler"


def _has_writer() -> bool:
    if not any(name in sys.modules for name in _WRITERS):
        return False
    return any(type(thread).__module__ in _WRITERS for thread in threading.enumerate())


def _traces_memory() -> bool:
    module = sys.modules.get("_tracemalloc") or sys.modules.get("tracemalloc")
    return module is not None and bool(module.is_tracing())


def _is_traced() -> bool:
    """Whether gdb or strace is attached."""
    return bool(field(read_bytes("/proc/self/status") or b"", b"TracerPid:"))
