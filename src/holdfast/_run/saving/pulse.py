"""The trainer's pulse: a thread that shows the keeper the state of the interpreter.

The main thread writes to the control page at a boundary only. Between two boundaries, once a
second, this thread shows that the interpreter runs, whether a person holds the main thread in a
debugger, and which profilers slow it down. While a call holds the GIL the pulse stops, which the
keeper notices too.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import functools
import operator
import os
import platform
import re
import sys
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast._environment.processes.activity import strongest_tool, tool_that_waits
from holdfast._environment.processes.proc import field, read_bytes
from holdfast._store.memory.control import (
    BOUNDARY_NS,
    COMPILES,
    DEBUGGERS,
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


# -- Debuggers: whether a person holds the training thread in one, or at a prompt ------------------
# A debugger that is only loaded holds nothing, nor does one whose frames surround the whole script
# (`python -m pdb train.py`). What counts is a function that waits for a person, called after the
# last boundary.
#
# The frames of other threads are read by faulthandler. Reading them by `sys._current_frames` ended
# CPython 3.11.7 with a segmentation fault within half a minute, at a read every 0.3 ms beside a
# training with torch; the cause is not known.


# bdb calls these when it has stopped, in any debugger that derives from it.
_STOPPED = frozenset(("user_line", "user_call", "user_return", "user_exception"))
_BDB = f"{os.__file__.rpartition('/')[0]}/bdb.py"
_KERNEL = "/ipykernel/"
_PROMPT = "a prompt"
_CELL = frozenset(("run_cell", "run_code", "run_cell_async", "run_ast_nodes"))
_STANDING_LOOKS = 2
_MOST_BYTES = 1 << 22
_MOST_SHARE = 0.001  # of one core: with hundreds of threads a poll takes milliseconds

_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)")
_FRAME = re.compile(r'  File "(.*)", line (?:\d+|\?\?\?) in (.*)')
_CUT = "  ..."

# The system calls in which input() waits, without and with readline: read(descriptor, …) and
# select(1, …) on descriptor 0.
_READS = {"x86_64": (b"0",), "aarch64": (b"63",)}.get(platform.machine(), ())
_SELECTS = {"x86_64": (b"23", b"270"), "aarch64": (b"72",)}.get(platform.machine(), ())

Stack = list[tuple[str, str]]  # file and function, the innermost first


class DebuggerWatch:
    """Observes from another thread whether a person holds the one that made it."""

    def __init__(self) -> None:
        self._thread = 0
        self._native = 0
        self._around = 0  # waiting functions that surround the training itself
        self._stood = 0  # polls without a boundary
        self._found = ""  # the tool
        self._next_look = 0.0
        self._file = -1
        with contextlib.suppress(OSError):
            self._file = os.memfd_create("holdfast-frames", os.MFD_CLOEXEC)
        self.note()

    def note(self) -> None:
        """In the training thread, which is not held now."""
        self._thread = threading.get_ident()
        self._native = threading.get_native_id()
        frame: FrameType | None = sys._getframe()
        frames = []
        while frame is not None:
            frames.append((frame.f_code.co_filename, frame.f_code.co_name))
            frame = frame.f_back
        self._around = len(_waits(frames))

    def look(self, *, stands: bool) -> int:
        """What holds it, as an index into DEBUGGERS; `stands`: it passed no boundary meanwhile."""
        self._stood = self._stood + 1 if stands else 0
        if not stands or self._file < 0:
            self._found = ""
        elif (now := time.monotonic()) >= self._next_look:
            before = time.thread_time()
            self._found = self._look_at_stacks()
            if not self._found and self._waits_for_terminal():
                self._found = _PROMPT
            self._next_look = now + (time.thread_time() - before) / _MOST_SHARE
        return DEBUGGERS.index(self._found)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _look_at_stacks(self) -> str:
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self._file, all_threads=True)
        stacks = parse_stacks(os.pread(self._file, _MOST_BYTES, 0).decode(errors="replace"))
        if self._thread not in stacks:
            return ""  # faulthandler shows a hundred threads, the newest first
        stack, is_whole = stacks.pop(self._thread)
        if not stack:
            return _PROMPT if hasattr(sys, "ps1") else ""  # at Python's own prompt
        found = _strongest(_waits(stack), self._around if is_whole else 0)
        is_in_kernel = hasattr(sys, "ps1") and any(_KERNEL in file for file, _ in stack)
        if not found and is_in_kernel and not any(function in _CELL for _, function in stack):
            return _PROMPT  # a notebook's kernel between two cells
        if not found and self._stood >= _STANDING_LOOKS:
            # Another thread in a debugger need not hold this one, unless this one waits for it.
            for other, _ in stacks.values():
                found = found or _strongest(_waits(other), 0)
            return found if found != _PROMPT else ""
        return found

    def _waits_for_terminal(self) -> bool:
        """True if it reads from a terminal: input() has no Python frame."""
        call = (read_bytes(f"/proc/self/task/{self._native}/syscall") or b"").split()
        if len(call) < 2:
            return False  # in no system call
        if call[0] in _READS:
            return os.isatty(int(call[1], 16))
        return call[0] in _SELECTS and int(call[1], 16) == 1 and os.isatty(0)


def parse_stacks(text: str) -> dict[int, tuple[Stack, bool]]:
    """The output of faulthandler, by thread: the frames, and True if they are complete."""
    found: dict[int, tuple[Stack, bool]] = {}
    thread = 0
    for line in text.splitlines():
        if (frame := _FRAME.match(line)) is not None:
            found[thread][0].append((frame[1], frame[2]))
        elif line == _CUT and thread in found:
            found[thread] = (found[thread][0], False)
        elif (head := _THREAD.match(line)) is not None:
            thread = int(head[1], 16)
            found[thread] = ([], True)
    return found


def _waits(stack: Iterable[tuple[str, str]]) -> list[str]:
    """The tools that wait for a person in this stack, the innermost first."""
    found: list[str] = []
    is_stopped = False
    for file, function in stack:
        if is_stopped and file == _BDB:
            found.append("a debugger")
        is_stopped = function in _STOPPED
        if tool := tool_that_waits(file, function):
            found.append(tool)
    return found


def _strongest(found: list[str], around: int) -> str:
    return strongest_tool(found[: max(0, len(found) - around)]) or ""


# -- Threads and processes that a debugger must leave alone ----------------------------------------
# pydevd, a part of debugpy and PyCharm, stops all threads when one is stopped, and attaches to
# every Python that is started: a keeper would wait for an editor before its first line, and end
# with the trainer. pydevd offers ways to decline both.


def never_held(thread: threading.Thread) -> threading.Thread:
    """Mark a thread, before it is started, so that it runs while others are stopped."""
    # As debugpy marks its own threads.
    thread.pydev_do_not_trace = True  # type: ignore[attr-defined]  # a mark that pydevd reads
    thread.is_pydev_daemon_thread = True  # type: ignore[attr-defined]  # a mark that pydevd reads
    return thread


@contextlib.contextmanager
def without_debugger() -> Iterator[None]:
    pydevd = sys.modules.get("_pydev_bundle.pydev_monkey")
    skip = getattr(pydevd, "skip_subprocess_arg_patch", contextlib.nullcontext)
    with skip():
        yield
