"""The guard: signal handlers and child processes of one open run."""

from __future__ import annotations

import _thread
import contextlib
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from holdfast import _errors
from holdfast._environment import variables
from holdfast._errors import is_interactive
from holdfast._run.signals.children import ChildShield
from holdfast._run.signals.crash_stacks import CrashStacks
from holdfast._run.signals.handlers import SignalWatch
from holdfast._run.signals.hosted import is_led
from holdfast._run.signals.process_one import Reaper, die_by_signals, is_first_process
from holdfast._store.folder.plain_file import open_plain
from holdfast._store.folder.requests import StopRequest, request_from_signal
from holdfast._text import say

_LONG_SECONDS = 120.0


class Guard:
    """Handles signals while a run is open, if it was opened in the main thread."""

    def __init__(
        self, numbers: tuple[int, ...], wakeup: int, stacks: Path, *, in_job: bool = False
    ) -> None:
        self._path = stacks
        self._in_job = in_job
        self._stacks: IO[bytes] | None = None
        self._crashes: CrashStacks | None = None
        self._watch: SignalWatch | None = None
        self._shield = ChildShield(numbers)
        self._reaper = Reaper() if is_first_process() else None
        self.noted: list[int] = []
        if threading.current_thread() is not threading.main_thread():
            _tell_of_thread()
            return
        descriptor = open_plain(stacks, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._stacks = os.fdopen(descriptor, "wb")
        self._watch = SignalWatch(numbers, wakeup, self._stacks)
        self.noted = self._watch.noted
        self._watch.install()
        self._crashes = CrashStacks(self._stacks)
        self._shield.install()
        if self._reaper is not None:
            self._reaper.start()

    def defer(self, defers: bool, *, holds_warnings: bool = False) -> None:
        """True: signals wait for a boundary. False: they act at once, but for warnings if asked."""
        if self._watch is not None:
            self._watch.defers = defers
            self._watch.holds_warnings = holds_warnings
            if defers and is_interactive():  # the run may be open since an earlier cell
                self._take_back()

    def rest(self, leave: Callable[[int], BaseException] | None) -> None:
        """While set, a signal raises what `leave` returns at once: no boundary will come."""
        if self._watch is not None:
            self._watch.leave = leave

    def wait_for_others(self) -> None:
        """With several ranks a signal alone does not leave: they decide together."""
        if self._watch is not None:
            self._watch.leaves_when_nudged = True

    def set_children_apart(self) -> None:
        """The launcher signals the whole process group: give children groups of their own."""
        self._shield.sets_apart = True

    def nudge(self, *, ends_the_step: bool = False) -> None:
        """From another thread: act in the main thread as if (a second) Ctrl-C had come."""
        if self._watch is None:
            return
        self._watch.nudged = True
        self._watch.ends_the_step = ends_the_step
        if hasattr(signal, "pthread_kill"):  # also interrupts a system call
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            _thread.interrupt_main(signal.SIGINT)

    def mend(self, is_alone: bool) -> None:
        """Reinstall handlers that another library has replaced, and say so."""
        if self._watch is not None:
            self._watch.is_alone = is_alone
        self._take_back()

    def _take_back(self) -> None:
        if self._watch is not None and threading.current_thread() is threading.main_thread():
            for what in self._watch.mend():
                say(f"{what} had been replaced by another library; it is restored now.")

    def request(self, asked: StopRequest | None) -> StopRequest | None:
        """The stop that a signal has asked for, or `asked`.

        In a job a person's request comes first: a signal after it would requeue the job.
        """
        by_person = asked is not None and asked.status == _errors.PERSON
        if not self.noted or (self._in_job and by_person):
            return asked
        return request_from_signal(self.noted[0])

    def call_users_handler(self, number: int) -> None:
        """Call the user's own handler of a signal, if there is one."""
        handler = self._watch.users_handler(number) if self._watch is not None else None
        if handler is not None:
            handler(number, None)

    def ignore_from_now(self, number: int) -> None:
        """Ignore a signal from the end of the run on: the process leaves already."""
        if self._watch is not None:
            self._watch.ignore_from_now(number)

    def remove(self) -> None:
        """Put everything back as it was."""
        self._shield.remove()
        if self._watch is not None and threading.current_thread() is threading.main_thread():
            self._watch.remove()
            if self._reaper is not None:
                die_by_signals()  # from now on no handler of ours answers them
        if self._reaper is not None:
            self._reaper.stop()
        if self._crashes is not None:
            self._crashes.remove()
        if self._stacks is not None:
            self._stacks.close()
            with contextlib.suppress(OSError):
                if self._path.stat().st_size == 0:
                    self._path.unlink()


def _tell_of_thread() -> None:
    if is_led():
        return
    if variables.text("RAY_RAYLET_PID"):
        say(
            "the run was opened in a worker of Ray, which takes `holdfast stop` for a failure and "
            "starts again, and keeps a relative folder among its temporary files.\n"
            "Use holdfast.ray.fit(trainer) in place of trainer.fit()."
        )
        return
    say(
        "the run was opened outside the main thread, where Python allows no signal "
        "handlers: it is stopped by `holdfast stop` or run.stop() only."
    )


@dataclass(frozen=True)
class TimeLeft:
    """The seconds between a signal and the kill, and those that a write takes, if known."""

    grace: float | None = None
    needed: float | None = None


def announce_signal(
    number: int,
    step: int,
    held: int | None = None,
    durable: int | None = None,
    time_left: TimeLeft = TimeLeft(),  # noqa: B008  frozen
) -> None:
    """Say at once what will happen, and what a second Ctrl-C does.

    `held` is the newest step in memory, `durable` the newest on disk.
    """
    kept = "nothing new" if held is None else f"step {held}"
    if number == signal.SIGINT and is_interactive():
        say(
            f"interrupted: step {step} is being finished and saved. "
            f"Another interrupt does not wait for it and keeps {kept}."
        )
    elif number == signal.SIGINT:
        say(
            f"Ctrl-C: step {step} is being finished and saved, then the run leaves. "
            f"Ctrl-C again leaves at once and keeps {kept}."
        )
    elif time_left.grace is not None:
        text = f"{signal.Signals(number).name}: step {step} is being finished and saved"
        if time_left.grace < _LONG_SECONDS:
            text += f"; {_what_is_certain(held, durable, time_left)}"
        say(f"{text}.")


def _what_is_certain(held: int | None, durable: int | None, time_left: TimeLeft) -> str:
    """What a kill at the end of the grace time leaves: only a durable step is certain."""
    certain = "nothing is durable yet" if durable is None else f"step {durable} is durable already"
    grace, needed = f"{time_left.grace:.0f} s", time_left.needed
    if needed is not None and time_left.grace is not None and needed > time_left.grace:
        return f"a save takes about {needed:.0f} s here, and there are {grace}: {certain}"
    if held is None or held == durable:
        return f"if {grace} are not enough, {certain}"
    return f"if {grace} are not enough, step {held} is likely kept; {certain}"
