"""Threads, and work that several of them share. Standard library only: the keeper uses it."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any


def start_thread(
    work: Callable[..., object], *arguments: Any, name: str | None = None
) -> threading.Thread | None:
    """A thread that does this work, unless the process ends; None if the system has no more."""
    thread = threading.Thread(target=work, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


def by_threads(
    work: Callable[[int], None], count: int, errors: list[BaseException] | None = None
) -> None:
    """Call `work` with 0 to count - 1, each in a thread, 0 in this one; raises the first error.

    Without more threads there are fewer calls. Returns only when all have ended, even if it is
    interrupted: they write to memory that the caller uses next. `errors` tells them to stop.
    """
    found: list[BaseException] = [] if errors is None else errors

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001  raised in the caller's thread
            found.append(error)

    others = [
        threading.Thread(target=guarded, args=(number,), name="holdfast-work", daemon=True)
        for number in range(1, count)
    ]
    try:
        with contextlib.suppress(RuntimeError):  # no more threads
            for thread in others:
                thread.start()
        guarded(0)
    except BaseException as error:  # noqa: BLE001  raised when the threads have ended
        found.append(error)
    for thread in others:
        _join_surely(thread, found)
    if found:
        raise found[0]


def _join_surely(thread: threading.Thread, errors: list[BaseException]) -> None:
    is_over = False
    while not is_over:
        try:
            if thread.is_alive():  # else it has not started, and will see the error if it does
                thread.join()
            is_over = True
        except BaseException as error:  # noqa: BLE001  raised when the thread has ended
            errors.append(error)


def run_all(works: Sequence[Callable[[], object]], threads: int) -> None:
    """Do all works in their order, by several threads; the first error is raised here."""
    numbers = itertools.count()
    errors: list[BaseException] = []

    def work(_: int) -> None:
        while not errors and (number := next(numbers)) < len(works):
            works[number]()

    by_threads(work, min(threads, len(works)), errors)
