"""Signals as something to wait for together with output.

They are blocked, so none can strike between two lines, and taken one by one, with whoever
sent them.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

_SET_BYTES = 128


def ignored_from_the_start(number: int) -> bool:
    """By a shell for its background, or by nohup: it stays so."""
    return signal.getsignal(number) is signal.SIG_IGN


def passed_on() -> set[signal.Signals]:
    """The signals that are meant for the command."""
    heard = {signal.SIGCONT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if not ignored_from_the_start(number):
            heard.add(number)
    return heard


class Ears:
    """Blocks signals, and hands them out."""

    def __init__(self, numbers: set[signal.Signals]) -> None:
        self._numbers = numbers
        self.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        self.descriptor = _signal_descriptor(numbers)

    def heard(self) -> Iterator[signal.struct_siginfo]:
        """Those that have come."""
        while (info := signal.sigtimedwait(self._numbers, 0)) is not None:
            yield info

    def wait(self, seconds: float) -> signal.struct_siginfo | None:
        """The next, if it comes within this time."""
        return signal.sigtimedwait(self._numbers, seconds)


def stand_still(*, with_group: bool) -> None:
    """Stop, as Ctrl-Z stops others; returns when somebody continues us.

    At once, where no shell is there to do so: the system stops nobody then.
    """
    # With us whatever else the shell has started for this job: a script, for one.
    os.kill(0 if with_group else os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


def name_of_process(pid: int) -> str:
    """The short name of a process; empty if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _signal_descriptor(numbers: set[signal.Signals]) -> int | None:
    """Readable while one of the signals waits; None where the system has nothing like it."""
    words = (ctypes.c_ulong * (_SET_BYTES // ctypes.sizeof(ctypes.c_ulong)))()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    for number in numbers:
        words[(number - 1) // bits] |= 1 << (number - 1) % bits
    try:
        found = ctypes.CDLL(None).signalfd(-1, words, os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, AttributeError):
        return None
    if found < 0:
        return None
    os.set_inheritable(found, False)
    return int(found)
