"""The Python stacks of processes, read from outside by py-spy.

py-spy is a separate process with a time limit: if it reads a process in a dead file system, it can
block there too, and survive a kill. `--nonblocking`: otherwise it would stop the process first, and
wait for one that is already stopped or frozen.
"""

from __future__ import annotations

import contextlib
import json
import os
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
