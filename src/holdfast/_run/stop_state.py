"""Why a session is to stop, and what it leaves with.

Requests come from signals, from the keeper's thread and from `run.stop()`; the next boundary acts
on them. Only this class writes its fields.
"""

from __future__ import annotations

from holdfast._errors import HoldfastError, Stopped
from holdfast._run.signals.guard import Guard, announce_signal
from holdfast._store.folder.requests import StopRequest, request_from_signal


class StopState:
    """Everything that says that one session is asked to stop, or has stopped."""

    def __init__(self) -> None:
        self.asked: StopRequest | None = None  # other than by a signal
        self.signals: list[int] = []  # that wait for a boundary; the signal handler appends
        self.error: HoldfastError | None = None  # to raise at the next boundary
        self.stopped: Stopped | None = None  # what the session leaves with
        self.last_step: int | None = None  # the step that is being saved as the last one
        self._asked_late: StopRequest | None = None  # in the last step of a loop
        self._is_announced = False
        self._guard: Guard | None = None

    def watch(self, guard: Guard) -> None:
        self._guard, self.signals = guard, guard.noted

    # -- requests ---------------------------------------------------------------------

    def ask(self, request: StopRequest, *, replaces: bool = False) -> None:
        """Stop at the next boundary. An earlier request stays, unless it is only a deadline."""
        if self.asked is None or self.asked.is_by_clock or replaces:
            self.asked = request

    def fail(self, error: HoldfastError) -> None:
        """Raise this at the next boundary."""
        self.error = error

    def request(self) -> StopRequest | None:
        """The stop that the next boundary is to make."""
        return self.asked if self._guard is None else self._guard.request(self.asked)

    @property
    def is_unasked(self) -> bool:
        return self.stopped is None and self.request() is None

    def announce(self, step: int) -> None:
        """Say once which signal came, where no keeper does."""
        if self.signals and not self._is_announced:
            self._is_announced = True
            announce_signal(self.signals[0], step)

    # -- a loop ends ------------------------------------------------------------------

    def postpone(self) -> None:
        """The training is complete: a stop in its last step interrupts only a later loop."""
        self._asked_late, self.asked = self.request(), None
        self.signals.clear()

    def resume_postponed(self) -> None:
        """Another loop begins."""
        self.asked, self._asked_late = self.asked or self._asked_late, None

    # -- leaving ----------------------------------------------------------------------

    def leave_phase(self, number: int, step: int) -> Stopped:
        """The exception that leaves a phase; called in the signal handler."""
        request = self.asked or request_from_signal(number)
        return Stopped(request.status, request.reason, step)

    def begin_last_save(self, step: int) -> None:
        self.last_step = step

    def stop(self, stopped: Stopped) -> Stopped:
        self.stopped = stopped
        return stopped

    def forget(self) -> None:
        """Drop the exception: a script that keeps the run would keep its frames too."""
        self.stopped = self.last_step = None
