"""Work in chunks for several threads, at low priority until a process waits for it.

An ordinary user cannot lower a niceness again. So background threads do one chunk at a time, and
when a process begins to wait, new threads at full priority take over the rest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from holdfast._store.commit.write_queue import Superseded
from holdfast._store.format.threads import start_thread

# -- Background work yields to the training on the same cores -------------------------------
# A thread's niceness counts only against threads of its own scheduling group. Where the kernel
# groups by session ("autogroup"), the keeper, which has a session of its own, would still take half
# of each core from the trainer: there the priority of the whole group is lowered.

_LOWEST = 19
# A twentieth of a core during a training: enough for the keeper's loop, which receives signals.
_GROUP_LEVEL = 14
_GROUP = Path("/proc/self/autogroup")
_TRIES, _TRY_SECONDS = 4, 0.04  # the kernel accepts one change of a group in a tenth of a second


class BackgroundPriority:
    """How many threads of this process work in the background, and whether any must hurry."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._quiet = self._loud = 0
        self._is_low = False
        self._threads: set[int] = set()  # in the background now

    @contextlib.contextmanager
    def background(self) -> Iterator[None]:
        """For a thread that does nothing else: it stays at the lowest priority."""
        number = threading.get_native_id()
        if sys.platform == "linux":  # elsewhere the number would mean a process
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, number, _LOWEST)
            self._threads.add(number)
        try:
            with self._counted(quiet=1):
                yield
        finally:
            self._threads.discard(number)

    def hurry(self) -> contextlib.AbstractContextManager[None]:
        """A process waits: the group returns to normal priority."""
        return self._counted(loud=1)

    def end(self) -> None:
        """The run stops: from now on nothing runs in the background."""
        self._count(0, 1)
        self.raise_threads()

    def raise_threads(self) -> None:
        """Restore the priority of background threads: allowed for root and with RLIMIT_NICE."""
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
                return False  # no groups here, or not now: that only costs the training some time
            time.sleep(_TRY_SECONDS)  # the kernel limits the rate
        else:
            return True
    return False


PRIORITY = BackgroundPriority()  # the group is one for the whole process

Piece = TypeVar("Piece")
_PATIENCE_SECONDS = 10.0
_GIVEN_UP = "a newer step is written in its place"


class WorkQueue(Generic[Piece]):
    """The remaining chunks of one work; the first error ends it, and `finish` raises it."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._left = deque(pieces)
        self._taken = 0
        self._change = threading.Condition()
        self._error: BaseException | None = None
        self.has_failed = False

    @property
    def is_done(self) -> bool:
        return not self._left and not self._taken

    def work(self, until: Callable[[], bool] = lambda: False) -> None:
        """Do chunks until none is left, or `until` is true; several threads call this."""
        while not until():
            with self._change:
                while not self._left and self._taken:
                    self._change.wait()  # another thread may return the rest of a large chunk
                if not self._left:
                    return
                piece = self._left.popleft()
                self._taken += 1
            rest = None
            try:
                rest = self.do(piece)
            except BaseException as error:  # noqa: BLE001  raised again by finish
                self._fail(error)
            with self._change:
                if rest is not None and not self.has_failed:
                    self._left.appendleft(rest)
                is_last = not self._left and self._taken == 1
                # Under the lock: two threads that finish together would both miss the end.
                if not is_last:
                    self._give_back()
            if is_last:
                if not self.has_failed:
                    try:
                        self.end()
                    except BaseException as error:  # noqa: BLE001  likewise
                        self._fail(error)
                with self._change:
                    self._give_back()

    def _give_back(self) -> None:
        self._taken -= 1
        self._change.notify_all()

    def do(self, piece: Piece) -> Piece | None:
        """Do one chunk; returns the rest of it, if any."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for the end, and raise the first error."""
        with self._change:
            while not self.is_done:
                self._change.wait()
            error, self._error = self._error, None  # its frames would keep memory alive
        if error is not None:
            raise error
        if self.has_failed:
            raise RuntimeError("it has failed before")

    def end(self) -> None:
        """Called after the last chunk."""

    def give_up(self, error: BaseException) -> None:
        """Skip what is not begun; `finish` raises the error. No effect if all is done."""
        if not self.is_done:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self._change:
            self.has_failed = True
            self._error = self._error or error
            self._left.clear()
            self._change.notify_all()  # no thread may have a chunk that it gives back


class CommitThreads:
    def __init__(self, *, is_background: bool) -> None:
        self._is_background = is_background
        self._is_given_up = False
        self._works: list[tuple[WorkQueue[Any], int]] = []
        self._guard = threading.Lock()
        # A training may never leave a core idle: the checkpoint must become durable anyway.
        self._timer = threading.Timer(_PATIENCE_SECONDS, self.hurry)
        self._timer.daemon = True
        if is_background:
            self._timer.start()

    def put_to(self, work: WorkQueue[Any], threads: int) -> None:
        with self._guard:
            if self._is_given_up:
                raise Superseded(_GIVEN_UP)
            self._works = [each for each in self._works if not each[0].is_done]
            self._works.append((work, threads))
            self._start(work, threads)

    def hurry(self) -> None:
        """A process waits for it now: continue at full priority."""
        with self._guard:
            if self._is_background and not self._is_given_up:
                self._is_background = False
                PRIORITY.raise_threads()
                for work, threads in self._works:
                    # No more threads: the existing ones go on.
                    with contextlib.suppress(RuntimeError):
                        self._start(work, threads)

    def give_up(self) -> None:
        """Write no more of it: a newer state is written in its place.

        If everything is written and only flushes are left, it goes on: flushing does not slow the
        newer write, and this checkpoint may become durable first.
        """
        with self._guard:
            self._is_given_up = True
            for work, _ in self._works:
                work.give_up(Superseded(_GIVEN_UP))

    def over(self) -> None:
        self._timer.cancel()
        with self._guard:
            self._works.clear()

    def _start(self, work: WorkQueue[Any], threads: int) -> None:
        priority = PRIORITY.background if self._is_background else PRIORITY.hurry

        def run() -> None:
            with priority():
                work.work()

        for number in range(threads):
            if start_thread(run) is None:
                if not number:
                    raise RuntimeError("no thread could be started")
                return  # the started threads do it all; failing now would close their file
