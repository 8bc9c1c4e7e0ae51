"""Who a process is, beyond a number that the system gives out again.

A pid means something only within one boot and one pid namespace, and only
together with the time at which the process started.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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


# -- How a process of ours is started, so that it is this very package and lives through signals.


# Its life is tied to the trainer's or to a pipe; whoever wants to end it must mean it. It is deaf
# before it imports anything: on a busy machine that takes seconds.
_UNHEARD = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


def command(module: str, plan: dict[str, Any], *, is_deaf: bool = True) -> list[str]:
    """What starts `main` of one of our modules, which is given the plan as JSON.

    Without `is_deaf`, signals act as they are set for the process that starts it.
    """
    package = str(Path(__file__).parents[3])
    program = (
        "import signal, sys\n"
        f"for name in {_UNHEARD if is_deaf else ()!r}:\n"
        "    signal.signal(getattr(signal, name), signal.SIG_IGN)\n"
        f"place = {package!r}\n"
        # Not in front: the script may have modules that are named like ours or like others'.
        "at = [i for i, p in enumerate(sys.path) if p.endswith('site-packages')]\n"
        "sys.path.insert(at[0] if at else len(sys.path), place)\n"
        f"from {module} import main\n"
        "main(sys.argv[1])\n"
    )
    return [sys.executable, "-P", "-c", program, json.dumps(plan)]
