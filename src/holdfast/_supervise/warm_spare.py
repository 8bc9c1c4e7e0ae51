"""The spare, as `holdfast run` has it: started once a run is open, given an attempt, or ended.

It never outlives us: it gets SIGTERM at our death, as every command does, and leaves when the pipe
for its orders closes. Whenever it cannot be used, the next attempt is a plain start.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._store.folder.supervised import led_modules
from holdfast._supervise.child import Outlet, Streams, start
from holdfast._supervise.record import SupervisionRecord
from holdfast._text import size

_PROGRAM = Path(__file__).with_name("spare_process.py")
_LOOK_SECONDS = 0.5
_END_SECONDS = 1.0
_MOST_BYTES = 65536
_PYTHON = re.compile(r"(python|pypy)(\d+(\.\d+)?)?t?")
# Options without a value that change nothing about how the script is run.
_FLAGS = frozenset("bBdEIOPqsSuv")
_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


@dataclass(frozen=True)
class PythonCommand:
    """`interpreter *options *target`; the target is `-m MODULE ARGS…` or `SCRIPT ARGS…`."""

    interpreter: str
    options: tuple[str, ...]
    target: tuple[str, ...]

    def running(self, program: str, *arguments: str) -> list[str]:
        """The same interpreter with the same options, but for another program.

        The target follows as arguments, so `ps` shows whose spare it is.
        """
        return [self.interpreter, *self.options, program, *arguments, *self.target]


def parse_command(command: Sequence[str]) -> PythonCommand | str:
    """The parts, or why there can be no spare for it."""
    name = os.path.basename(command[0])  # noqa: PTH119  no Path at a start
    if not _PYTHON.fullmatch(name):
        return f"the command is {name!r}, and not `python SCRIPT` or `python -m MODULE`"
    options, rest = list[str](), list(command[1:])
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word in _WITH_VALUE:
            options += [word, *rest[:1]]
            del rest[:1]
        elif word.startswith(("-W", "-X")) or _FLAGS.issuperset(word[1:]):
            options.append(word)
        elif word[-1] == "m" and _FLAGS.issuperset(word[1:-1]) and rest:
            options += [f"-{word[1:-1]}"] if len(word) > len("-m") else []
            return PythonCommand(command[0], tuple(options), ("-m", *rest))
        else:
            return f"Python's option {word} is not known to it"
    if not rest or rest[0] == "-":
        return "it runs no script"
    if not os.path.isfile(rest[0]):  # noqa: PTH113  as above
        return f"{rest[0]!r} is no file"
    return PythonCommand(command[0], tuple(options), tuple(rest))


class SpareProcess:
    """One process with the streams of the next attempt, and the two pipes to it."""

    def __init__(
        self,
        command: PythonCommand,
        environment: Mapping[str, str],
        outlets: Mapping[int, Outlet],
        mask: set[int | signal.Signals],
        modules: Path,
    ) -> None:
        """`modules` is the file with the names of what the first process has imported."""
        self._record: SupervisionRecord | None = None
        self.is_reaped = False  # its pid may be another's
        self.streams = Streams(outlets, self._add_output)
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        os.set_blocking(self._answers, False)
        words = command.running(str(_PROGRAM), str(orders), str(answers), str(modules))
        try:
            given = (orders, answers)
            self.pid = start(words, environment, self.streams, mask, inherited=given)
        except OSError:
            self.close()
            raise
        finally:
            os.close(orders)
            os.close(answers)

    def receive(self) -> dict[str, Any] | None:
        """Its answer; None if there is none yet, or if it has ended without one."""
        with contextlib.suppress(BlockingIOError, ValueError):
            found: dict[str, Any] = json.loads(os.read(self._answers, _MOST_BYTES))
            return found
        return None

    def run_script(self, record: SupervisionRecord) -> bool:
        """It becomes the attempt of this record; False if it has just died."""
        self._record = record
        # In our group it has the keys of our terminal, as every command there.
        group = None if self.streams.has_own_session else os.getpgrp()
        self.streams.copy_terminal(self.pid)
        with contextlib.suppress(OSError):
            os.write(self._orders, json.dumps({"group": group}).encode())
            return True
        return False

    def close_pipes(self) -> None:
        os.close(self._orders)
        os.close(self._answers)

    def close(self) -> None:
        self.close_pipes()
        self.streams.close()

    def _add_output(self, data: bytes) -> None:
        if self._record is not None:
            self._record.add_output(data)


class WarmSpare:
    def __init__(
        self,
        command: PythonCommand,
        outlets: Mapping[int, Outlet],
        mask: set[int | signal.Signals],
    ) -> None:
        self.pids: set[int] = set()  # below us, and no part of the command
        self._command = command
        self._outlets = outlets
        self._mask = mask
        self._delay_seconds = variables.seconds("HOLDFAST_SPARE_SECONDS", 5.0)
        self._process: SpareProcess | None = None
        self._is_ready = False
        self._is_refused = False  # it would be refused again
        self._is_due = False
        self._said: set[str] = set()
        self._record: SupervisionRecord | None = None
        self._environment: Mapping[str, str] = {}
        self._say: Callable[[str], None] = lambda _: None
        self._opened_at: float | None = None
        self._next = 0.0

    def watch(
        self,
        record: SupervisionRecord,
        environment: Mapping[str, str],
        say: Callable[[str], None],
    ) -> None:
        """An attempt has begun. `environment` is that of the next one."""
        self.pids.clear()
        self._record, self._environment, self._say = record, environment, say
        self._opened_at = None
        self._is_due = record.folder is not None and not self._is_refused
        self._next = time.monotonic() + _LOOK_SECONDS

    def next_poll_seconds(self) -> float | None:
        """None: there is nothing to wait for."""
        is_starting = self._process is not None and not self._is_ready
        return max(0.0, self._next - time.monotonic()) if self._is_due or is_starting else None

    def poll(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_SECONDS
        if self._is_due:
            self._start_when_open(now)
        elif self._process is not None and not self._is_ready:
            self._receive(self._process)

    def observe_reaped(self, pid: int, status: int) -> None:
        """A child of ours has ended."""
        if self._process is None or pid != self._process.pid:
            return
        self._process.is_reaped = True
        if not self._is_ready:
            self._receive(self._process)  # why it has ended
        if self._process is not None:
            how = f"signal {-status}" if status < 0 else f"status {status}"
            self._say_once(f"the spare has ended ({how}): the next start is a plain one.")
            self._drop()

    def take(self, record: SupervisionRecord) -> tuple[int, Streams] | None:
        """The process and the streams of the next attempt; None if it has to be a plain start."""
        process = self._process
        if process is None:
            return None
        if not self._is_ready or not process.run_script(record):
            why = "it has just ended" if self._is_ready else "it is not ready yet"
            self._say(f"not going on in the spare: {why}.")
            self.close()
            return None
        self._process = None
        process.close_pipes()
        return process.pid, process.streams

    def close(self) -> None:
        if self._process is None:
            return
        process, pid = self._process, self._process.pid
        self._drop()
        if process.is_reaped:
            return
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _END_SECONDS
        # One that waits for a disk is not waited for: it is reaped by the next attempt, or by init.
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.002)

    def _start_when_open(self, now: float) -> None:
        assert self._record is not None
        assert self._record.folder is not None
        modules = led_modules(self._record.folder)
        if self._opened_at is None:
            if not os.path.exists(modules):  # noqa: PTH110  cheap: it runs twice a second
                return
            self._opened_at = now
        if now - self._opened_at < self._delay_seconds:
            return
        self._is_due = self._is_ready = False
        with contextlib.suppress(OSError):  # no process or no terminal more: a plain start, then
            self._process = SpareProcess(
                self._command, self._environment, self._outlets, self._mask, modules
            )
            self.pids.add(self._process.pid)

    def _receive(self, process: SpareProcess) -> None:
        answer = process.receive()
        if answer is None:
            return
        if "ready" in answer:
            self._is_ready = True
            # What we need ourselves between an end and the next start.
            import holdfast._diagnose.deaths.judge
            import holdfast._diagnose.evidence.gather
            import holdfast._supervise.restart  # noqa: F401  only loaded

            if self._record is not None:
                self._record.write(spare={"pid": process.pid, "memory": answer["ready"]})
            if "ready" not in self._said:
                self._said.add("ready")
                memory = f", {size(answer['ready'])} of memory" if answer["ready"] else ""
                self._say(f"a spare is ready (pid {process.pid}{memory}).")
            return
        self._is_refused = True
        why = f"no spare: {answer.get('refused')}."
        self._say_once(f"{why}\n  A restart is a plain start, as without --spare.")
        self.close()

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._say(text)

    def _drop(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
            self._is_ready = False
