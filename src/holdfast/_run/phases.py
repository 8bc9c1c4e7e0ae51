"""Phases: stretches of work that pass no boundary, such as an evaluation.

A phase rests on the boundary before it. That boundary is in memory when the phase begins, so
a stop inside can leave at once and loses nothing: the phase is repeated as a whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from holdfast._errors import HoldfastError, Stopped
from holdfast._run.saving.keeper_client import Custody
from holdfast._run.signals.guard import Guard
from holdfast._run.witness.observer import RunObserver
from holdfast._store.memory.control import HEARD, IN_LOOP, REST, RESTS, begin_rest, end_rest


class Phases:
    """The phases of one life that are running, the outermost first."""

    def __init__(
        self,
        words: Any,
        guard: Guard,
        custody: Custody,
        leave: Callable[[int], Stopped],
        eye: RunObserver | None = None,
    ) -> None:
        self._words = words
        self._guard = guard
        self._custody = custody
        self._leave = leave
        self._eye = eye
        self._names: list[str] = []
        self._resting = 0  # those that pass no boundary
        self._last_step = -1  # in which a phase began amid steps
        self._every: int | None = None
        self._has_rested = False  # in this epoch, outside of its loops
        self._left_by: tuple[int, str] | None = None  # an exception, and the phase it came from
        self.follows_loops = True  # whether to expect one there: until an epoch had none

    @property
    def name(self) -> str | None:
        """The innermost phase."""
        return self._names[-1] if self._names else None

    @property
    def rests(self) -> bool:
        return self._resting > 0

    @property
    def expected_step(self) -> int:
        """The boundary before the next phase amid steps, if they are regular."""
        return sys.maxsize if self._every is None else self._last_step + self._every

    def expect(self, step: int) -> None:
        """A phase will begin behind this step: whoever makes the loop may know."""
        self._every = step - self._last_step

    def remember(self) -> list[int | None]:
        """What the next life is to know of when phases come."""
        return [self._last_step, self._every]

    def recall(self, memory: list[int | None] | None) -> None:
        if memory is not None:
            self._last_step, self._every = memory[0] or 0, memory[1]

    def turn(self) -> None:
        """An epoch is over."""
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
        self._custody.tell_phase(name)
        if self._eye is not None:
            self._eye.phase(name)

    def end(self, *, trains: bool) -> None:
        name, error = self._names.pop(), sys.exc_info()[1]
        if error is not None and not self.was_left_by(error):
            # Not the exception itself, which would keep all that its frames hold.
            self._left_by = (id(error), name)
        self._resting -= not trains
        self._custody.tell_phase(self.name)
        if not self._resting:
            self._guard.rest(None)
            self._words[REST] = 0
            if not trains:
                end_rest(self._words)

    def was_left_by(self, error: BaseException) -> str | None:
        """The innermost phase that an exception came from."""
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
        """Amid steps, the boundary before a phase is in memory only if we knew it was coming."""
        every, self._last_step = step - self._last_step, step
        if every > 0:
            self._every = every

    def _hear(self, number: int) -> Stopped:
        """In the signal handler: what leaves the phase."""
        self._guard.rest(None)  # once: the next signal has another meaning
        self._words[REST] = HEARD
        return self._leave(number)
