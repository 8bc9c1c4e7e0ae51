"""Who a process is, beyond a number that the system gives out again.

A pid means something only within one boot and one pid namespace, and only
together with the time at which the process started.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, told apart from every other that ever had its pid."""

    pid: int
    started: str
    host: str
    boot: str
    namespace: str

    def is_here(self) -> bool:
        """Whether its pid can be looked up from this process."""
        return bool(self.boot) and (self.boot, self.namespace) == (_boot(), _namespace())

    def is_alive(self) -> bool:
        """Whether it still runs; only to be asked if `is_here()`."""
        return bool(self.started) and _started(self.pid) == self.started


def host_name() -> str:
    """The name of this machine."""
    if hasattr(os, "uname"):
        return os.uname().nodename
    import socket  # Windows

    return socket.gethostname()


def of_process(pid: int | None = None) -> ProcessIdentity:
    """The identity of a process of this machine, of this one if none is given."""
    pid = os.getpid() if pid is None else pid
    return ProcessIdentity(pid, _started(pid), host_name(), _boot(), _namespace())


def _started(pid: int) -> str:
    if sys.platform == "linux":
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return ""
        # The name in parentheses may hold anything, so count from the last one.
        fields = text.rpartition(")")[2].split()
        state, started = fields[0], fields[19]
        return "" if state in "ZX" else started
    import psutil  # slow to import, and needed only where there is no /proc

    try:
        return repr(psutil.Process(pid).create_time())
    except psutil.Error:
        return ""


def _boot() -> str:
    if sys.platform == "linux":
        try:
            return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            return ""
    return host_name()


def _namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""
