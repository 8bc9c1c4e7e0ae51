"""The evidence of a process by its pid: alive, or dead and recorded somewhere."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from holdfast import _text
from holdfast._diagnose.evidence.evidence import Evidence, Record
from holdfast._diagnose.evidence.gather import gather_led
from holdfast._diagnose.texts.log_file import read_log
from holdfast._diagnose.texts.signs import Sign, read_signs
from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.supervised import led_output, led_record, lives, supervisions

_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting in the kernel, for a disk or a network",
    "T": "stopped (kill -CONT goes on with it)",
    "t": "stopped by a debugger",
    "Z": "ended, and not yet awaited by its parent",
    "I": "idle",
}
_KERNEL_SECONDS = 3.0


def gather_pid(pid: int) -> Evidence:
    """The evidence of a process that runs or has run on this machine."""
    evidence = Evidence(subject=f"process {pid}", kind="pid")
    process = look_at(pid)
    if process is not None and process.get("state") != "Z":
        evidence.process, evidence.is_live = process, True
        evidence.notes.append(_living(pid, process))
        return evidence
    found = _find_led(pid)
    if found is not None:
        return found
    evidence.signs = kernel_signs(pid)
    for sign in evidence.signs:
        evidence.notes.append(f"The kernel's log has: {sign.text}")
    if process is not None:
        evidence.process = process
        _add_zombie(evidence, pid, process)
    elif not evidence.signs:
        evidence.notes.append(
            f"There is no process {pid} on {host_name()}. Neither `holdfast run` nor the kernel's "
            f"log has a record of one{_unread()}."
        )
        evidence.notes.append(
            "Linux keeps nothing of a process that has ended. What its parent saw is lost; its "
            "output may tell: holdfast why LOGFILE. For the next time: holdfast run -- COMMAND"
        )
    return evidence


def look_at(pid: int) -> Record | None:
    """A process as /proc has it; None if there is none, or no /proc."""
    folder = Path("/proc", str(pid))
    try:
        text = folder.joinpath("stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None if sys.platform == "linux" or not _answers(pid) else {"pid": pid}
    comm = text[text.find("(") + 1 : text.rfind(")")]
    fields = text.rpartition(")")[2].split()
    process: Record = {"pid": pid, "comm": comm}
    with contextlib.suppress(IndexError, ValueError, OSError):
        ticks = os.sysconf("SC_CLK_TCK")
        process["state"] = fields[0]
        process["parent"] = int(fields[1])
        process["cpu_seconds"] = (int(fields[11]) + int(fields[12])) / ticks
        process["rss"] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        process["started"] = time.time() - uptime + int(fields[19]) / ticks
        process["exit_code"] = int(fields[49])
    with contextlib.suppress(OSError):
        command = folder.joinpath("cmdline").read_bytes().split(b"\0")
        process["command"] = [os.fsdecode(word) for word in command if word][:64]
    with contextlib.suppress(OSError):
        process["cwd"] = str(folder.joinpath("cwd").readlink())
    with contextlib.suppress(OSError):
        process["parent_comm"] = (
            Path("/proc", str(process.get("parent", 0)), "comm").read_text(errors="replace").strip()
        )
    return process


def kernel_signs(pid: int) -> list[Sign]:
    """The lines of the kernel's log about a process, where they may be read."""
    own = re.compile(rf"(?:[Pp]rocess |pid[ =]|\[){pid}\b")
    lines = [line for line in kernel_log() if own.search(line)]
    kinds = ("kernel_oom", "kernel_segfault", "kernel_trap", "cuda_error")
    signs = [sign for sign in read_signs("\n".join(lines)) if sign.kind in kinds]
    is_of_cgroup = any("constraint=CONSTRAINT_MEMCG" in line for line in lines)
    for sign in signs:
        if sign.kind == "kernel_oom" and is_of_cgroup:
            sign.details["of_cgroup"] = True
    return [sign for sign in signs if sign.details.get("pid", pid) == pid]


def kernel_log() -> list[str]:
    """The kernel's messages, oldest first; empty where only root may read them."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            ["dmesg", "--notime"],
            env=variables.child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_KERNEL_SECONDS,
        )
        return said.stdout.splitlines()
    return []


def _find_led(pid: int) -> Evidence | None:
    """By the records of `holdfast run`; a pid is used again, so the newest counts."""
    for supervision in reversed(supervisions()):
        for life in reversed(lives(supervision)):
            led = read_json(led_record(life))
            which = _which(led, pid)
            if which is None:
                continue
            evidence = gather_led(life)
            evidence.subject = f"process {pid}"
            if not evidence.signs:
                with contextlib.suppress(OSError):
                    evidence.signs, evidence.output = read_log(led_output(life))
            evidence.notes.append(which)
            return evidence
    return None


def _which(led: Record, pid: int) -> str | None:
    """What the process was in a life of a command; None if it was not part of it."""
    if led.get("host") not in (None, host_name()):
        return None
    if led.get("child_pid") == pid:
        return f"Process {pid} was led by `holdfast run`."
    if led.get("leader_pid") == pid:
        return f"Process {pid} was `holdfast run` itself; this is of the command that it led."
    processes = led.get("processes")
    for each in processes if isinstance(processes, list) else []:
        if isinstance(each, dict) and each.get("pid") == pid:
            comm = each.get("comm")
            status = _status_words(each.get("status"))
            return (
                f"Process {pid}{f' ({comm})' if comm else ''} was a descendant of the command "
                f"that `holdfast run` led{status}."
            )
    return None


def _status_words(status: object) -> str:
    if not isinstance(status, int):
        return ""
    name = _text.signal_name(status)
    return f", and died of {name}" if name else f", and left with status {status}"


def _living(pid: int, process: Record) -> str:
    state = _STATES.get(str(process.get("state")), "alive")
    command = " ".join(process.get("command") or [str(process.get("comm", ""))])[:200]
    return f"Process {pid} is {state}: {command}"


def _add_zombie(evidence: Evidence, pid: int, process: Record) -> None:
    """A zombie has its status before its parent asks."""
    code = process.get("exit_code")
    parent: Any = process.get("parent_comm") or "its parent"
    said = ""
    if isinstance(code, int) and (code or os.geteuid() == 0):
        status = -(code & 0x7F) if code & 0x7F else code >> 8
        said = _status_words(status)
        evidence.led = {"child_pid": pid, "status": status, "host": host_name()}
    evidence.notes.append(f"Process {pid} has ended{said}; {parent} has not awaited it yet.")


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _unread() -> str:
    return "" if os.access("/dev/kmsg", os.R_OK) else ", which only root may read here"
