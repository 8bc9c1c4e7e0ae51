"""Signals that the trainer receives, as its wakeup descriptor passes them to the keeper."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

from holdfast import _errors
from holdfast._store.folder.requests import SAME_PRESS_SECONDS
from holdfast._store.memory import control

_KEPT = 32
_OF_CHILDREN = (signal.SIGCHLD,)  # data loaders cause it: no evidence in a post-mortem


class SignalArrival:
    """A signal that asks the run to stop."""

    def __init__(self, number: int, *, is_final: bool) -> None:
        self.number = number
        self.is_final = is_final  # a second Ctrl-C, or SIGQUIT: leave without another step

    @property
    def name(self) -> str:
        return signal.Signals(self.number).name

    @property
    def reason(self) -> str:
        is_second = self.is_final and self.number == signal.SIGINT
        return "second Ctrl-C" if is_second else self.name

    @property
    def status(self) -> int:
        if self.number == signal.SIGQUIT:
            return 128 + self.number
        return _errors.of_signal(self.number)


class SignalReader:
    """Reads the numbers and drops what asks for nothing."""

    def __init__(self, descriptor: int, numbers: Collection[int], words: Any) -> None:
        self.recent: deque[dict[str, Any]] = deque(maxlen=_KEPT)  # for a post-mortem
        self._descriptor = descriptor
        self._numbers = frozenset(numbers)
        self._words = words
        self._interrupted_at: float | None = None  # the first Ctrl-C
        self._expects_nudge = False

    def expect_nudge(self) -> None:
        """The trainer will interrupt its own main thread: the next SIGINT is no request."""
        self._expects_nudge = True

    def read(self) -> Iterator[SignalArrival]:
        """The stop requests that have arrived; EOFError when none can come any more."""
        try:
            numbers = os.read(self._descriptor, 256)
        except BlockingIOError:
            return
        if not numbers:
            raise EOFError
        for number in numbers:
            if number not in _OF_CHILDREN:
                self.recent.append({"time": time.time(), "name": _name_of(number)})
            if number in self._numbers and (found := self._classify(number)) is not None:
                yield found

    def _classify(self, number: int) -> SignalArrival | None:
        if not self._words[control.IN_LOOP]:
            return None  # outside the loop the trainer acts at once, by itself
        if number != signal.SIGINT:
            # SIGQUIT arrives here only if the trainer is process 1; it ends any other.
            return SignalArrival(number, is_final=number == signal.SIGQUIT)
        if self._expects_nudge:
            self._expects_nudge = False
            return None
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            return SignalArrival(number, is_final=False)
        if now - self._interrupted_at <= SAME_PRESS_SECONDS:
            return None
        return SignalArrival(number, is_final=True)


def _name_of(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
