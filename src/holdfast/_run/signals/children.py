"""Protects the trainer's children from signals of the terminal.

Ctrl-C goes to every process of the foreground group. Data-loader workers would die of it, and the
step that is to be finished would lack its data. So while a run is open, multiprocessing starts
children with those signals blocked: unlike a handler, a mask survives fork and exec. SIGTERM stays
open, since it is how workers are ended.

A launcher such as torchrun sends SIGTERM to the whole group of a rank. There the children get
process groups of their own.
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
def children_deferred() -> Iterator[list[int]]:
    """Defer the user's SIGCHLD handler until our own work is done; clear the list to drop it.

    torch's handler raises as soon as a worker has died, between any two lines: a slot would stay
    locked, or a state would not be saved.
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
                # Its start unblocks signals, so it must run already.
                from multiprocessing import resource_tracker

                resource_tracker.ensure_running()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            try:
                former(process)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            if self.sets_apart and process.pid is not None:
                # A child that has called exec already sets its own group.
                with contextlib.suppress(OSError):
                    os.setpgid(process.pid, process.pid)

        # The one method that starts every child of multiprocessing.
        processes.BaseProcess.start = start  # type: ignore[method-assign,assignment]

    def remove(self) -> None:
        if self._former is not None:
            from multiprocessing import process as processes

            processes.BaseProcess.start = self._former  # type: ignore[method-assign]  # as it was
            self._former = None


def _quit() -> int:
    return int(getattr(signal, "SIGQUIT", 0))
