"""Signals as events to wait for together with output, and warnings that wait for a handler.

The signals are blocked, so none can interrupt between two lines. They are taken one by one, each
with its sender.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterator

from holdfast._supervise import children

_SET_BYTES = 128
_LOOK_SECONDS = 0.05
_LOOK_SELDOM_SECONDS = 0.5
_IMPORTS_SECONDS = 120.0  # a process that has no handler by then hardly ever gets one


def passed_on() -> set[signal.Signals]:
    """The signals that are meant for the command."""
    found = {signal.SIGCONT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        # Ignored by a shell for its background, or by nohup: it stays so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            found.add(number)
    return found


class SignalQueue:
    def __init__(self, numbers: set[signal.Signals]) -> None:
        self._numbers = numbers
        self.mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        self.descriptor = _signal_descriptor(numbers)

    def received(self) -> Iterator[signal.struct_siginfo]:
        while (info := signal.sigtimedwait(self._numbers, 0)) is not None:
            yield info

    def wait(self, seconds: float) -> signal.struct_siginfo | None:
        return signal.sigtimedwait(self._numbers, seconds)


def stop_ourselves(*, with_group: bool) -> None:
    """Stop, as Ctrl-Z does; returns when we are continued.

    Returns at once where no shell could continue us: the system stops no process then.
    """
    # The group also has other processes that the shell has started for this job.
    os.kill(0 if with_group else os.getpid(), signal.SIGTSTP)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTSTP})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTSTP})


class Warnings:
    """The warning signals that have come, until all processes that should get them have.

    One that comes while the trainer still imports torch would kill it. So it is given only to
    processes that catch it, and is kept until there are some.
    """

    def __init__(self, top: int, apart: Collection[int]) -> None:
        """`apart` are those below `top` that are no part of the command."""
        self._top = top
        self._apart = apart
        self._came: dict[int, float] = {}
        self._given: dict[int, float] = {}  # when the first process got it
        self._reached: dict[int, set[int]] = {}

    def add(self, number: int) -> None:
        """A signal has come. The same signal again, later, is a new request."""
        self._came[number] = time.monotonic()
        self._reached[number] = set()
        self._given.pop(number, None)

    def deliver(self) -> None:
        """Send each to the processes that catch it by now and have not got it yet."""
        for number in self._came:
            reached = self._reached[number]
            for pid in children.catchers(self._top, number, {*reached, *self._apart}):
                # torchrun starts its ranks together, well before the first of them catches
                # anything. A rank that began after that was restarted in order to train: the
                # warning was for those before. (A run of holdfast that was asked to stop leaves
                # again by itself.)
                given = self._given.get(number)
                if given is not None and children.age_seconds(pid) < time.monotonic() - given:
                    continue
                reached.add(pid)
                children.send(pid, number)
                self._given.setdefault(number, time.monotonic())

    def next_poll_seconds(self) -> float | None:
        """None: there is nothing to deliver."""
        if not self._came:
            return None
        is_early = time.monotonic() - max(self._came.values()) < _IMPORTS_SECONDS
        return _LOOK_SECONDS if is_early else _LOOK_SELDOM_SECONDS


def _signal_descriptor(numbers: set[signal.Signals]) -> int | None:
    """Readable while one of the signals is pending; None where the system has no signalfd."""
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
