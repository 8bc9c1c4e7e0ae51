"""Work that nobody waits for gives way to the training on the same cores.

A thread's niceness counts only against threads of its own scheduling group, and where the
kernel groups by session ("autogroup") the keeper, which has a session of its own, would take
half of each core from the trainer all the same: there the whole group steps back meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_LOWEST = 19
# A twentieth of a core beside a training: the keeper's loop, which hears signals, lives on it.
_GROUP_LEVEL = 14
_GROUP = Path("/proc/self/autogroup")
_TRIES, _TRY_SECONDS = 4, 0.04  # the kernel takes one change of a group in a tenth of a second


class Quiet:
    """How many threads of this process work in the background, and whether any must hurry."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._quiet = self._loud = 0
        self._is_low = False
        self._threads: set[int] = set()  # in the background now

    @contextlib.contextmanager
    def background(self) -> Iterator[None]:
        """For a thread of this work alone: it stays at the lowest priority for good."""
        number = threading.get_native_id()
        if sys.platform == "linux":  # elsewhere it takes a process, and this number may be one
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, number, _LOWEST)
            self._threads.add(number)
        try:
            with self._counted(quiet=1):
                yield
        finally:
            self._threads.discard(number)

    @contextlib.contextmanager
    def hurry(self) -> Iterator[None]:
        """Somebody waits: the group goes back to where it was."""
        with self._counted(loud=1):
            yield

    def end(self) -> None:
        """A stop has come: from now on nothing here gives way."""
        self._count(0, 1)
        self.raise_threads()

    def raise_threads(self) -> None:
        """Give the threads in the background back their priority, where the system allows it.

        It does so for root, and where RLIMIT_NICE is set.
        """
        for number in tuple(self._threads):
            with contextlib.suppress(OSError):
                os.setpriority(
                    os.PRIO_PROCESS, number, os.getpriority(os.PRIO_PROCESS, os.getpid())
                )

    @contextlib.contextmanager
    def _counted(self, quiet: int = 0, loud: int = 0) -> Iterator[None]:
        self._count(quiet, loud)
        try:
            yield
        finally:
            self._count(-quiet, -loud)

    def _count(self, quiet: int, loud: int) -> None:
        with self._guard:
            self._quiet += quiet
            self._loud += loud
            wanted = self._quiet > 0 and self._loud == 0
            if wanted != self._is_low and _set_group(_GROUP_LEVEL if wanted else 0):
                self._is_low = wanted


def _set_group(niceness: int) -> bool:
    for _ in range(_TRIES):
        try:
            _GROUP.write_text(str(niceness), encoding="ascii")
        except OSError as error:
            if error.errno != errno.EAGAIN or niceness:
                return False  # no groups here; or not now: nothing is lost but some quiet
            time.sleep(_TRY_SECONDS)  # the only thing that helps against the kernel's limit
        else:
            return True
    return False


QUIET = Quiet()  # the group is one for the whole process
