"""Children of the trainer do not hear the terminal.

Ctrl-C goes to every process of the foreground group. Data-loader workers would
die of it, and the step that is to be finished would fail for want of data. So
while a run is open, children that multiprocessing starts are born with those
signals blocked: a blocked mask, unlike a handler, survives fork and exec alike,
and the trainer itself loses no signal by it. SIGTERM stays open to them, since
that is how they are ended.

A launcher such as torchrun sends it to the whole group of a rank, though: there they
get a group of their own, or the step that is to be finished fails for want of data.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from holdfast._run.signals.handlers import uninterruptible

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess


@contextlib.contextmanager
def children_unheard() -> Iterator[list[int]]:
    """Let the handler of a child's death wait until our own work is done.

    It is not called if whoever works clears the list that this gives.

    torch's raises as soon as a worker of a loader has died, between any two lines: a slot would
    stay locked, or a state that was to be saved would not be.
    """
    number = getattr(signal, "SIGCHLD", None)
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(number) if number is not None and is_main else None
    heard: list[int] = []
    if number is None or not callable(handler):
        yield heard
        return
    signal.signal(number, lambda *_: heard.append(1))
    try:
        yield heard
    finally:
        signal.signal(number, handler)
    if heard:
        handler(number, None)


class ChildShield:
    """Blocks some signals in every child that multiprocessing starts, while installed."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._numbers = {n for n in numbers if n not in (signal.SIGTERM, _quit())}
        self._former: Any = None
        self.sets_apart = False  # True: each child gets a process group of its own

    def install(self) -> None:
        if not hasattr(signal, "pthread_sigmask") or not self._numbers:
            return
        from multiprocessing import process as processes  # slow to import

        self._former = former = processes.BaseProcess.start
        numbers = self._numbers

        @uninterruptible
        @functools.wraps(former)
        def start(process: BaseProcess) -> None:
            if getattr(process, "_start_method", None) != "fork":
                # It unblocks signals around its own start, so it must run already.
                from multiprocessing import resource_tracker

                resource_tracker.ensure_running()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            try:
                former(process)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if self.sets_apart and process.pid is not None:
                # One that has become another program already does it by itself, when it begins.
                with contextlib.suppress(OSError):
                    os.setpgid(process.pid, process.pid)

        # Their own method, and nothing less, is what every child of theirs comes by.
        processes.BaseProcess.start = start  # type: ignore[method-assign,assignment]

    def remove(self) -> None:
        if self._former is not None:
            from multiprocessing import process as processes

            processes.BaseProcess.start = self._former  # type: ignore[method-assign]  # as it was
            self._former = None


def _quit() -> int:
    return int(getattr(signal, "SIGQUIT", 0))
