"""Python stacks of a crash at C level, such as a segmentation fault.

A script that has enabled faulthandler itself keeps its own destination.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import weakref
from typing import IO


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
            _watch_forks()

    def remove(self) -> None:
        """Disable it, unless other code has enabled its own meanwhile."""
        # Only faulthandler holds the destination.
        if self._destination is not None and self._destination() is not None:
            faulthandler.disable()
        self._destination = None
        _installed.discard(self)


class _Destination:
    """The part of a file object that faulthandler needs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def flush(self) -> None:
        pass


_installed: weakref.WeakSet[CrashStacks] = weakref.WeakSet()
_is_watching_forks = False


def _watch_forks() -> None:
    global _is_watching_forks
    if not _is_watching_forks and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget_in_child)
        _is_watching_forks = True


def _forget_in_child() -> None:
    # A worker's crash must not look like the trainer's.
    for each in list(_installed):
        each.remove()
