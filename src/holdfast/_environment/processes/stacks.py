"""The Python stacks of processes, read from outside by py-spy, or written by themselves.

py-spy is a separate process with a time limit: if it reads a process in a dead file system, it can
block there too, and survive a kill. `--nonblocking`: otherwise it would stop the process first, and
wait for one that is already stopped or frozen.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from holdfast._environment import variables
from holdfast._environment.processes.proc import FairDeadline, read_bytes, read_number
from holdfast._environment.processes.threads import STACKS_FILE, catches

MOST_FRAMES = 60
_AT_ONCE = 4
_PAUSE_SECONDS = 0.005
_DEATH_SECONDS = 0.1
_OFF = ("0", "off", "no", "false")


@dataclass
class PythonThread:
    tid: int | None
    name: str | None
    owns_gil: bool | None
    frames: list[dict[str, Any]]  # innermost first
    ident: int = 0  # the interpreter's number


@dataclass
class Dump:
    """The stacks of one process, or why there are none."""

    threads: list[PythonThread] = field(default_factory=list)
    error: str | None = None
    is_late: bool = False  # no answer came in time


def find_pyspy() -> str | None:
    """The program: the chosen one, that of this Python's environment, or one on the path."""
    chosen = variables.text("HOLDFAST_PY_SPY")
    if chosen.lower() in _OFF:
        return None
    if chosen:
        return shutil.which(chosen)
    own = Path(sys.executable).with_name("py-spy") if sys.executable else "py-spy"
    return shutil.which(own) or shutil.which("py-spy")


def why_missing() -> str:
    chosen = variables.text("HOLDFAST_PY_SPY")
    if chosen.lower() in _OFF:
        return "py-spy is switched off by HOLDFAST_PY_SPY"
    if chosen:
        return f"HOLDFAST_PY_SPY names a program that cannot be run: {chosen}"
    return "py-spy is not installed: pip install py-spy"


# They are polled later, or they would stay as zombies.
_abandoned: list[subprocess.Popen[bytes]] = []


class _Running:
    def __init__(self, program: str, pid: int, seconds: float) -> None:
        self.pid = pid
        self._out, self._err = _file(), _file()
        try:
            self.process = subprocess.Popen(
                [program, "dump", "--nonblocking", "--json", "--pid", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
                cwd="/",
            )
        except BaseException:
            self.close()
            raise
        self.deadline = FairDeadline(seconds, lambda: [self.process.pid])

    def result(self) -> Dump:
        """Valid once it has ended."""
        text = _content(self._out)
        if self.process.returncode == 0:
            with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
                threads = _threads(json.loads(text), self.pid)
                return Dump(threads, None if threads else f"py-spy sees no Python in {self.pid}")
        return Dump(error=_reason(_content(self._err).decode(errors="replace"), self.pid))

    def abandon(self) -> None:
        """Kill it, without waiting for a process that a file system blocks."""
        with contextlib.suppress(OSError):
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_DEATH_SECONDS)
            return
        _abandoned.append(self.process)

    def close(self) -> None:
        self._out.close()
        self._err.close()


def dump_stacks(
    pids: Sequence[int],
    seconds: float,
    program: str | None,
    get_on: Callable[[], None] = lambda: None,
) -> dict[int, Dump]:
    """The stacks of each process, in this order. `get_on` is called meanwhile.

    Each py-spy has that time, plus its wait for a processor. After one without an answer, no
    further one is started.
    """
    if program is None:
        return {pid: Dump(error=why_missing()) for pid in pids}
    _abandoned[:] = [each for each in _abandoned if each.poll() is None]
    waiting, running = list(pids), list[_Running]()
    found: dict[int, Dump] = {}
    try:
        while waiting or running:
            get_on()
            while waiting and len(running) < _AT_ONCE:
                pid = waiting.pop(0)
                try:
                    running.append(_Running(program, pid, seconds))
                except OSError as error:
                    found[pid] = Dump(error=f"py-spy cannot be started: {error.strerror}")
            for each in [each for each in running if each.process.poll() is not None]:
                found[each.pid] = each.result()
                each.close()
                running.remove(each)
            for each in [each for each in running if each.deadline.is_over()]:
                each.abandon()
                each.close()
                running.remove(each)
                waiting.clear()
            time.sleep(_PAUSE_SECONDS)
    finally:
        for each in running:
            each.abandon()
            each.close()
    late = Dump(error=f"py-spy has not answered within {seconds:.1f} s", is_late=True)
    return {pid: found.get(pid, late) for pid in pids}


def _threads(records: list[dict[str, Any]], pid: int) -> list[PythonThread]:
    return [
        PythonThread(
            tid=record.get("os_thread_id"),
            name=record.get("thread_name"),
            owns_gil=record.get("owns_gil"),
            frames=[
                {"file": each["filename"], "line": each["line"], "name": each["name"]}
                for each in record["frames"][:MOST_FRAMES]
            ],
            ident=record.get("thread_id") or 0,
        )
        for record in records
        if record.get("pid", pid) == pid
    ]


def _reason(text: str, pid: int) -> str:
    text = text.partition("Stack backtrace:")[0]  # its own, where RUST_BACKTRACE is set
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    whole = " ".join(lines).lower()
    if "permission denied" in whole or "operation not permitted" in whole:
        return f"py-spy may not read process {pid}: {_why_refused(pid)}"
    if "no such file or directory" in whole or "no such process" in whole:
        return f"process {pid} has ended"
    causes = [line.partition(":")[2].strip() for line in lines if line[:2] in ("0:", "1:", "2:")]
    if not causes and "failed to find python version" in whole:
        return f"process {pid} runs no Python that py-spy knows"
    told = (causes[-1:] or lines[:1] or ["no reason given"])[0].removeprefix("Error: ")
    return f"py-spy cannot read process {pid}: {told[:200]}"


def _why_refused(pid: int) -> str:
    scope = read_number("/proc/sys/kernel/yama/ptrace_scope") or 0
    with contextlib.suppress(OSError):
        if os.geteuid() not in (0, os.stat(f"/proc/{pid}").st_uid):  # noqa: PTH116  quicker
            return "it belongs to another user: ask as that user, or as root"
    if scope == 3:
        return "ptrace is switched off here (kernel.yama.ptrace_scope is 3)"
    if scope == 2:
        return "ptrace is for root alone here (kernel.yama.ptrace_scope is 2)"
    if scope == 1:
        return "as root only, or after: sudo sysctl kernel.yama.ptrace_scope=0"
    status = read_bytes("/proc/self/status") or b""
    if b"\nSeccomp:\t2" in status:
        return "the container forbids ptrace (start it with --cap-add SYS_PTRACE)"
    return "the system forbids it"


def _file() -> IO[bytes]:
    # A pipe would have to be emptied meanwhile, and a disk may be what hangs.
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("holdfast-py-spy", os.MFD_CLOEXEC), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


# -- Stacks that processes write themselves at a signal --------------------------------------------
# Used where py-spy is missing or forbidden. The trainer has registered faulthandler for a signal
# (see `_run/signals/handlers.py`), and its forked workers inherit that. All write into one file
# in memory, whose name has the number of the signal. A process that does not have that file open
# gets no signal: it has no handler, and would die.

_ANSWER_PAUSE_SECONDS = 0.01
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
            time.sleep(_ANSWER_PAUSE_SECONDS)
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
