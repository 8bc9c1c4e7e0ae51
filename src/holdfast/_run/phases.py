"""Phases: work that passes no boundary, such as an evaluation.

The boundary before a phase is in memory when the phase begins. So a stop inside leaves at once and
loses nothing: the phase is repeated as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from holdfast._errors import HoldfastError, Stopped
from holdfast._run.saving.keeper_client import KeeperClient
from holdfast._run.signals.guard import Guard
from holdfast._run.witness.observer import RunObserver
from holdfast._store.memory.control import HEARD, IN_LOOP, REST, RESTS, begin_rest, end_rest


class Phases:
    """The running phases of a session, the outermost first."""

    def __init__(
        self,
        words: Any,
        guard: Guard,
        keeper: KeeperClient,
        leave: Callable[[int], Stopped],
        eye: RunObserver | None = None,
    ) -> None:
        self._words = words
        self._guard = guard
        self._keeper = keeper
        self._leave = leave
        self._eye = eye
        self._names: list[str] = []
        self._resting = 0  # phases that pass no boundary
        self._last_step = -1  # at which a phase began between steps
        self._every: int | None = None
        self._has_rested = False  # in this epoch, outside its loops
        self._left_by: tuple[int, str] | None = None  # an exception, and the phase it came from
        self.follows_loops = True  # True until an epoch had none after its loops

    @property
    def name(self) -> str | None:
        """The innermost phase."""
        return self._names[-1] if self._names else None

    @property
    def rests(self) -> bool:
        return self._resting > 0

    @property
    def expected_step(self) -> int:
        """The step before the next phase between steps, if they are regular."""
        return sys.maxsize if self._every is None else self._last_step + self._every

    def expect(self, step: int) -> None:
        """A phase will begin after this step, as a trainer knows."""
        self._every = step - self._last_step

    def remember(self) -> list[int | None]:
        """When phases come, for the next attempt."""
        return [self._last_step, self._every]

    def recall(self, memory: list[int | None] | None) -> None:
        if memory is not None:
            self._last_step, self._every = memory[0] or 0, memory[1]

    def end_epoch(self) -> None:
        self.follows_loops, self._has_rested = self._has_rested, False

    def begin(self, name: str, *, trains: bool, step: int, is_amid_steps: bool) -> None:
        if not trains and not self._resting and self._words[IN_LOOP]:
            if is_amid_steps:
                self._expect_next(step)
            self._has_rested |= not is_amid_steps
            self._words[REST] = RESTS
            self._guard.rest(self._hear)
        if not trains and not self._resting:
            begin_rest(self._words)
        self._names.append(name)
        self._resting += not trains
        self._keeper.send_phase(name)
        if self._eye is not None:
            self._eye.phase(name)

    def end(self, *, trains: bool) -> None:
        name, error = self._names.pop(), sys.exc_info()[1]
        if error is not None and not self.was_left_by(error):
            # Not the exception itself, which would keep all that its frames hold.
            self._left_by = (id(error), name)
        self._resting -= not trains
        self._keeper.send_phase(self.name)
        if not self._resting:
            self._guard.rest(None)
            self._words[REST] = 0
            if not trains:
                end_rest(self._words)

    def was_left_by(self, error: BaseException) -> str | None:
        """The innermost phase that an exception has left."""
        known = self._left_by
        return known[1] if known is not None and known[0] == id(error) else None

    def refuse(self, what: str) -> None:
        """Refuse boundaries inside a phase that is to be repeated as a whole."""
        if self._resting:
            raise HoldfastError(
                f"{what}() inside run.phase({self.name!r}): a phase is repeated as a whole, so it "
                "has no boundaries.\n"
                f"If it trains, say so: run.phase({self.name!r}, trains=True)."
            )

    def _expect_next(self, step: int) -> None:
        """Between steps, the boundary before a phase is in memory only if it was expected."""
        every, self._last_step = step - self._last_step, step
        if every > 0:
            self._every = every

    def _hear(self, number: int) -> Stopped:
        """In the signal handler: the exception that leaves the phase."""
        self._guard.rest(None)  # only once: a second signal means something else
        self._words[REST] = HEARD
        return self._leave(number)
