"""Lets the keeper read the stacks of this process while a run is open.

By py-spy, which reads from outside: where the system allows that to a parent only, the keeper is
permitted. And by a signal, on which faulthandler writes the stack of every thread into a file in
memory that the keeper shares. That works at C level, even while a call holds the GIL. Forked
workers have both too, so that the line of a stuck one can be named.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import weakref
from pathlib import Path
from typing import IO

from holdfast._environment.processes.libc import c_handler, libc
from holdfast._environment.processes.threads import STACKS_FILE

_FIRST = 7  # after SIGRTMIN: the C library and others use the first ones
_TRIES = 6
_PR_SET_PTRACER = 0x59616D61  # "Yama"
_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


class StackDump:
    """The signal in the name of its file makes this process write its stacks."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self._number = 0
        self._at_c_level = b""
        self._keeper = 0
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            self._register()

    def admit(self, keeper: int) -> None:
        """Permit the keeper and its children to read ours; only one process can be permitted."""
        with contextlib.suppress(OSError):
            # Where Yama permits ptrace to parents only; elsewhere nothing is changed.
            if _SCOPE.read_bytes().strip() == b"1":
                self._keeper = keeper
                _allow(keeper)
                _installed.add(self)

    def remove(self) -> None:
        _installed.discard(self)
        if self._keeper:
            _allow(0)
            self._keeper = 0
        number, self._number = self._number, 0
        # Other code that has taken the signal over keeps it.
        if number and c_handler(number) == self._at_c_level:
            faulthandler.unregister(number)
            if self.descriptor is not None:
                os.close(self.descriptor)
        self.descriptor = None

    def after_fork(self) -> None:
        _allow(self._keeper)  # unlike the handler and the file, the permission is not inherited

    def _register(self) -> None:
        import fcntl  # not on Windows

        number = _find_unused()
        if number is None:
            return
        descriptor = os.memfd_create(f"{STACKS_FILE}{number}", os.MFD_CLOEXEC)
        try:
            # Append mode: the keeper truncates it, and workers write to it too.
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
            faulthandler.register(number, file=descriptor, all_threads=True, chain=False)
        except BaseException:
            os.close(descriptor)
            raise
        self.descriptor, self._number = descriptor, number
        self._at_c_level = c_handler(number)


def _find_unused() -> int | None:
    if sys.platform != "linux":
        return None
    default = bytes(len(c_handler(signal.SIGRTMIN + _FIRST)))
    for number in range(signal.SIGRTMIN + _FIRST, signal.SIGRTMIN + _FIRST + _TRIES):
        if number < signal.SIGRTMAX and c_handler(number) == default:
            return number
    return None


def _allow(pid: int) -> None:
    import ctypes

    words = [ctypes.c_ulong(each) for each in (pid, 0, 0, 0)]
    with contextlib.suppress(OSError, AttributeError):
        libc().prctl(_PR_SET_PTRACER, *words)


# -- Python stacks of a crash at C level, such as a segmentation fault -----------------------------
# A script that has enabled faulthandler itself keeps its own destination.


class CrashStacks:
    """While installed, a crash of this process writes the stack of every thread into a file."""

    def __init__(self, stacks: IO[bytes]) -> None:
        self._destination: weakref.ref[_Destination] | None = None
        if faulthandler.is_enabled():
            return
        destination = _Destination(stacks.fileno())
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            faulthandler.enable(file=destination, all_threads=True)
            self._destination = weakref.ref(destination)
            _installed.add(self)

    def remove(self) -> None:
        # Only faulthandler holds the destination.
        if self._destination is not None and self._destination() is not None:
            faulthandler.disable()
        self._destination = None
        _installed.discard(self)

    def after_fork(self) -> None:
        self.remove()  # a worker's crash must not look like the trainer's


class _Destination:
    """The part of a file object that faulthandler needs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def flush(self) -> None:
        pass


# -- Forked children -------------------------------------------------------------------------------


_installed: weakref.WeakSet[StackDump | CrashStacks] = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_installed):
        each.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
