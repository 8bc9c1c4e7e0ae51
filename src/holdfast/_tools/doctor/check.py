"""The result of one check of `holdfast doctor`, and questions that may never be answered.

A dead file system blocks every process that touches it, even against SIGKILL, and so does a GPU
that has failed. So a small process asks, which can be abandoned: without an answer in time it is
killed and not waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from holdfast._environment import variables
from holdfast._environment.processes.proc import FairDeadline

State = Literal["ok", "warn", "fail"]

# From harmless to grave: the table ends with the gravest, next to the prompt.
STATES: tuple[State, ...] = ("ok", "warn", "fail")


@dataclass(frozen=True, slots=True)
class Check:
    """`found` is what was measured, `remedy` what to do: each one line without a full stop."""

    name: str  # one or two words, the same in every run: scripts search for it
    state: State
    found: str
    remedy: str = ""  # "" where there is nothing to do
    data: dict[str, Any] = field(default_factory=dict)  # plain values only: it becomes JSON

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def worst(checks: Iterable[Check]) -> State:
    """The gravest state of all; "ok" without any check."""
    return max((check.state for check in checks), key=STATES.index, default="ok")


def slow(name: str, what: str, deadline: FairDeadline) -> Check | None:
    """The check for something that was late on a busy machine; None: the machine was not busy."""
    if not deadline.is_starved():
        return None
    load = os.getloadavg()[0]
    found = f"slow: {what}, the machine is busy (load {load:.0f})"
    return Check(name, "warn", found, "try again when fewer processes compute", {"load": load})


_MOST_BYTES = 1 << 16
_INTERRUPTED = (130, -2)
FACTS = Path(__file__).with_name("machine_facts.py")


class Question:
    """Starts at once, so that several are answered at the same time.

    It has `seconds`, plus the time that it waits for a processor: a process that is slow to start
    says nothing about a file system.
    """

    def __init__(self, program: Path, *words: str, seconds: float) -> None:
        command = [sys.executable, "-I", "-S", str(program), *words]
        self._process: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError, ValueError):
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=variables.child_environment(),
            )
        self._seconds = seconds
        self._is_late = False
        self._deadline = FairDeadline(seconds, lambda: [self._process.pid] if self._process else [])

    def answer(self) -> dict[str, Any] | None:
        """Its last line until the deadline; None if there is none.

        KeyboardInterrupt if Ctrl-C has ended it: that goes to all processes of the terminal, and
        Python may have lost it here, within a callback.
        """
        process = self._process
        if process is None or process.stdout is None:
            return None
        try:
            while process.poll() is None and not self._deadline.is_over():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, self._deadline.at - time.monotonic()))
            if process.returncode in _INTERRUPTED:
                raise KeyboardInterrupt
            # The answer is a few lines, which fit into the pipe; a late process may have begun it.
            if process.returncode is None:
                os.set_blocking(process.stdout.fileno(), False)
            said = os.read(process.stdout.fileno(), _MOST_BYTES)
            found = json.loads(said.rpartition(b"\n")[0].rpartition(b"\n")[2])
        except (OSError, ValueError, AttributeError):  # Windows has no such pipes
            self._is_late = process.returncode is None
            return None
        finally:
            self.drop()
        return found if isinstance(found, dict) else None

    def slow(self, name: str) -> Check | None:
        """The check for an answer that did not come; None if no busy machine is the reason."""
        if not self._is_late:
            return None
        return slow(name, f"no answer within {self._seconds:.1f} s", self._deadline)

    def drop(self) -> None:
        """End the process if possible; never wait for it for long."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdout is not None:
            process.stdout.close()
        if process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
            if process.returncode is None:
                process.returncode = -9  # else Python warns of it at our exit
