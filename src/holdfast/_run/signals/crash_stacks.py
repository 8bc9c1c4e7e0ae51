"""The stack of a crash: of what ends a process at C level, Python can still say where it was.

Without it a segmentation fault leaves a number and nothing else. Whoever has asked for these
stacks already, by PYTHONFAULTHANDLER or by a call of his own, keeps them where he wants them.
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
        """Put it back, unless somebody has taken it over meanwhile."""
        # faulthandler holds what it writes to, and nobody else does.
        if self._destination is not None and self._destination() is not None:
            faulthandler.disable()
        self._destination = None
        _installed.discard(self)


class _Destination:
    """As much of a file as faulthandler asks for."""

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
    # The crash of a worker must not be taken for the trainer's.
    for each in list(_installed):
        each.remove()
