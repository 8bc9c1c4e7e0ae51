"""Debuggers: whether a person holds the training thread in one, or at a prompt.

A debugger that is only loaded holds nothing, nor does one whose frames surround the whole script
(`python -m pdb train.py`). What counts is a function that waits for a person, called after the last
boundary.

The frames of other threads are read by faulthandler. Reading them by `sys._current_frames` ended
CPython 3.11.7 with a segmentation fault within half a minute, at a read every 0.3 ms beside a
training with torch; the cause is not known.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType

from holdfast._environment.processes.activity import strongest_tool, tool_that_waits
from holdfast._environment.processes.proc import read_bytes
from holdfast._store.memory.control import DEBUGGERS

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
