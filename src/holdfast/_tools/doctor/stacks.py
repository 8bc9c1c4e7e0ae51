"""Whether the stacks of a run that hangs can be read: tried on a process that stands still."""

from __future__ import annotations

import sys
import time

from holdfast._environment.processes.proc import read_bytes, read_number
from holdfast._environment.processes.pyspy import Dump, dump_stacks, find_pyspy
from holdfast._text import duration
from holdfast._tools.doctor.finding import Check
from holdfast._tools.doctor.question import STAND_STILL, Question

_SECONDS = 3.0
_STANDS_IN = "stand_still_for_doctor"
_AGAIN_SECONDS = 0.05


def try_stacks() -> Check | None:
    """A real look at a real process; None where holdfast has no way to look."""
    if sys.platform != "linux":
        return None
    program = find_pyspy()
    if program is None:
        return judge_stacks(None, 0.0)
    target = Question(STAND_STILL)
    deadline = time.monotonic() + _SECONDS
    try:
        began = time.monotonic()
        dump = Dump(error="the process to be looked at did not start")
        while target.pid is not None and (left := deadline - time.monotonic()) > 0:
            began = time.monotonic()
            dump = dump_stacks([target.pid], left, program)[target.pid]
            if _is_seen(dump):
                break
            # It may still be on its way into the function that it will stand in.
            time.sleep(_AGAIN_SECONDS)
            if dump.error is not None and time.monotonic() > deadline - _SECONDS / 2:
                break
        return judge_stacks(dump, time.monotonic() - began)
    finally:
        target.drop()


def _is_seen(dump: Dump) -> bool:
    names = [frame.get("name") for thread in dump.threads for frame in thread.frames]
    return _STANDS_IN in names


def judge_stacks(dump: Dump | None, seconds: float) -> Check:
    """What the trial showed; None: there is no py-spy."""
    scope = read_number("/proc/sys/kernel/yama/ptrace_scope")
    data = {"ptrace_scope": scope, "seconds": round(seconds, 3), "error": None}
    told = "" if scope is None else f" (ptrace scope {scope})"
    if dump is None:
        return Check(
            "stacks",
            "warn",
            "py-spy is missing: the stacks of a hang come from Python alone, and not of processes "
            "that it has not prepared",
            "pip install py-spy",
            data | {"error": "missing"},
        )
    if _is_seen(dump):
        found = f"py-spy reads those of a process in {duration(seconds)}{told}"
        return Check("stacks", "ok", found, "", data)
    said = (dump.error or "it saw no frames").replace("\n", " ")
    return Check(
        "stacks",
        "warn",
        f"{said}{told}: those of a hang come from Python alone",
        _remedy(scope),
        data | {"error": said},
    )


def _remedy(scope: int | None) -> str:
    if scope:
        return "sysctl kernel.yama.ptrace_scope=1   (as root; 0 if that does not help)"
    if b"\nSeccomp:\t2" in (read_bytes("/proc/self/status") or b""):
        return "docker run --cap-add SYS_PTRACE …"
    return "pip install --upgrade py-spy"
