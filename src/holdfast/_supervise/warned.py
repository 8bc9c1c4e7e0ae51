"""Warnings that wait until somebody catches them."""

from __future__ import annotations

import contextlib
import os
import time

from holdfast._supervise import family

_LOOK_SECONDS = 0.05
_LOOK_SELDOM_SECONDS = 0.5
_IMPORTS_SECONDS = 120.0  # after which whoever does not catch a signal yet hardly ever will


class Warnings:
    """The warning signals that have come, until all who should have got them have.

    One that comes while the trainer still imports torch would kill it. So it is given only to
    processes that catch it, and is kept until there are some.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._came: dict[int, float] = {}
        self._given: dict[int, float] = {}  # when the first process got it
        self._reached: dict[int, set[int]] = {}

    def add(self, number: int) -> None:
        """A signal has come. The same once more, later, is a new wish."""
        self._came[number] = time.monotonic()
        self._reached[number] = set()
        self._given.pop(number, None)

    def deliver(self) -> None:
        """Give each to whoever catches it by now and has not got it yet."""
        for number in self._came:
            reached = self._reached[number]
            for pid in family.catchers(self._top, number, reached):
                if self._is_of_a_later_life(number, pid):
                    continue
                reached.add(pid)
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
                self._given.setdefault(number, time.monotonic())

    def next_look_seconds(self) -> float | None:
        """None: there is nothing to give."""
        now = time.monotonic()
        if not self._came:
            return None
        if any(now - came < _IMPORTS_SECONDS for came in self._came.values()):
            return _LOOK_SECONDS
        return _LOOK_SELDOM_SECONDS

    def _is_of_a_later_life(self, number: int, pid: int) -> bool:
        # torchrun starts its ranks together, well before the first of them catches anything.
        # One that began after that was started anew, to train: the wish was for those before.
        # (A run of holdfast that was asked to stop leaves again by itself.)
        given = self._given.get(number)
        return given is not None and family.age_seconds(pid) < time.monotonic() - given
