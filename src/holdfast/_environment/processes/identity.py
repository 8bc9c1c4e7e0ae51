"""The identity of a process: its pid, start time, boot and pid namespace.

The system reuses pids, so a pid alone does not name a process.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._environment.processes.proc import stat_fields


@dataclass(frozen=True)
class ProcessIdentity:
    """One process, different from every other process that had its pid."""

    pid: int
    started: str
    host: str
    boot: str
    namespace: str

    def is_here(self) -> bool:
        """True if this process can see its pid."""
        return bool(self.boot) and (self.boot, self.namespace) == (_boot(), _namespace())

    def is_alive(self) -> bool:
        """True if it still runs; valid only if `is_here()`."""
        return bool(self.started) and _started(self.pid) == self.started


def host_name() -> str:
    if hasattr(os, "uname"):
        return os.uname().nodename
    import socket  # Windows

    return socket.gethostname()


def of_process(pid: int | None = None) -> ProcessIdentity:
    """The identity of a process of this machine; without a pid, of this process."""
    pid = os.getpid() if pid is None else pid
    return ProcessIdentity(pid, _started(pid), host_name(), _boot(), _namespace())


def _started(pid: int) -> str:
    if sys.platform == "linux":
        fields = stat_fields(pid)
        return fields[19].decode() if fields and fields[0] not in (b"Z", b"X") else ""
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


# -- The command that starts a process of ours, from this very package -----------------------------


# It ends with the trainer or with a pipe, not by a signal to the group. It ignores signals before
# its first import: on a busy machine the imports take seconds.
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


def command(module: str, plan: dict[str, Any], *, is_deaf: bool = True) -> list[str]:
    """Starts `main` of one of our modules with the plan as JSON.

    Without `is_deaf` it inherits the signal settings of its parent.
    """
    package = str(Path(__file__).parents[3])
    program = (
        "import signal, sys\n"
        f"for name in {_IGNORED if is_deaf else ()!r}:\n"
        "    signal.signal(getattr(signal, name), signal.SIG_IGN)\n"
        f"place = {package!r}\n"
        # Not in front: modules of the script may have the same names.
        "at = [i for i, p in enumerate(sys.path) if p.endswith('site-packages')]\n"
        "sys.path.insert(at[0] if at else len(sys.path), place)\n"
        f"from {module} import main\n"
        "main(sys.argv[1])\n"
    )
    return [sys.executable, "-P", "-c", program, json.dumps(plan)]
