"""Copies that a device makes by itself: a slot is whole when its copy has landed.

The trainer goes on meanwhile. A thread waits for the device, so that the slot counts from
the very moment at which its last byte has come, however long the next step takes. At most
one copy is in the air; a kill before it lands leaves the slots before it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol


class Flight(Protocol):
    """A copy on its way."""

    def wait(self) -> bool:
        """Return when it is over: True if the slot holds the state of its boundary."""


class DeviceCopies(Protocol):
    """Copies tensors of devices into the slots of one arena."""

    cost_seconds: float  # what a copy is known to keep the device from its work
    is_ahead: bool  # the device had work to do while the processor began the last copy

    def begin(self, slot: int, values: list[Any], *, careful: bool) -> Flight | None:
        """Begin a copy; None if it is over already. A careful one cannot fail to be right."""

    def close(self) -> None: ...


class Landings:
    """Waits for flights, one at a time."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._queue: queue.SimpleQueue[tuple[Flight, Callable[[bool], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._is_free = threading.Event()
        self._is_free.set()

    @property
    def is_free(self) -> bool:
        """Whether nothing is in the air."""
        return self._is_free.is_set()

    def wait(self, deadline: float) -> bool:
        """Whether everything has landed by a moment of the monotonic clock."""
        return self._is_free.wait(max(0.0, deadline - time.monotonic()))

    def expect(self, flight: Flight, then: Callable[[bool], None]) -> None:
        """Call `then` in the thread when a flight is over: with whether it went well."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="holdfast-landing", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no thread is to be had: the trainer waits for it
                self._land(flight, then)
                return
            self._thread = thread
        self._is_free.clear()
        self._queue.put((flight, then))

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                self._land(*item)
            finally:
                self._is_free.set()

    def _land(self, flight: Flight, then: Callable[[bool], None]) -> None:
        try:
            good = flight.wait()
        except Exception as error:  # noqa: BLE001  the device's: training itself will say more
            self._say(f"a snapshot was lost on its way from the device: {error}")
            good = False
        then(good)
