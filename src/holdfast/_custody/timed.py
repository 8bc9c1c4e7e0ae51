"""A checkpoint that notes how training went on while it was written."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from holdfast._custody.orders import Handle
from holdfast._save.control import STEP
from holdfast._save.tempo import Writing


class TimedHandle(Handle):
    """One that the cadence asked for."""

    def __init__(self, control: Any, step: int) -> None:
        super().__init__("cadence")
        self._control = control
        self._began = time.monotonic()
        self._began_step = step
        self._ended: tuple[float, int] | None = None

    def ordered(self) -> None:
        """Training goes on from here; until now it has waited."""
        self._began = time.monotonic()

    def settle(self, error: str | None = None) -> None:
        # The run may be closed before its last checkpoint is settled, and its words with it.
        with contextlib.suppress(ValueError):
            if error is None:
                self._ended = (time.monotonic(), int(self._control[STEP]))
        super().settle(error)

    def writing(self, now: float, step: int) -> Writing | None:
        """Its course, until now if it is not durable yet; None of one that failed.

        And none where the trainer has written it itself, and waited.
        """
        ended = (now, step) if not self.done else self._ended
        if ended is None or ended[0] <= self._began:
            return None
        return Writing(self._began, self._began_step, *ended)
