"""A checkpoint written by the trainer itself, without arena or keeper.

For machines without memory for slots, and for systems without a keeper. Training waits meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from holdfast._adapters.registry import adapter_of
from holdfast._run.saving.cadence import WriteTiming
from holdfast._run.saving.keeper_client import Handle
from holdfast._state.capture import Captured
from holdfast._store.commit.chunks import CommitThreads
from holdfast._store.commit.dedup import newest_former
from holdfast._store.commit.source import Ranges, Source
from holdfast._store.commit.write import Policy, State, keep_checkpoint, remove_old
from holdfast._store.format.image import encode_scalars, plan_image
from holdfast._store.memory.control import STEP


def write_direct(
    policy: Policy, captured: Captured, head: dict[str, Any], step: int, reason: str
) -> None:
    """Write a captured state; returns when it is durable."""
    scalars = encode_scalars({**head, "step": step, "tree": captured.tree})
    plan = plan_image(captured.specs, len(scalars))
    by_name = dict(zip((s.name for s in captured.specs), captured.values, strict=True))
    views = [memoryview(plan.header)]
    views += [adapter_of(s.kind).bytes_of(by_name[s.name]) for s, _ in plan.in_file_order()]
    views.append(memoryview(scalars.ljust(plan.scalars.size_bytes)))
    state = State(policy.attempt, step, reason, head["metrics"], bool(head.get("at_turn")))
    former = newest_former(policy.layout, policy.line, policy.rank)
    source = Source(views, Ranges.of(plan.extents()))
    keep_checkpoint(policy, state, source, CommitThreads(is_background=False), former)
    remove_old(policy)


# -- The time that writing a checkpoint takes ------------------------------------------------------


class TimedHandle(Handle):
    """A checkpoint that the cadence asked for."""

    def __init__(self, control: Any, step: int) -> None:
        super().__init__("cadence")
        self._control = control
        self._began = time.monotonic()
        self._began_step = step
        self._ended: tuple[float, int] | None = None

    def ordered(self) -> None:
        """The trainer has waited until now, and goes on."""
        self._began = time.monotonic()

    def resolve(self, error: str | None = None) -> None:
        # The words may be released before the last checkpoint is resolved.
        with contextlib.suppress(ValueError):
            if error is None:
                self._ended = (time.monotonic(), int(self._control[STEP]))
        super().resolve(error)

    def writing(self, now: float, step: int) -> WriteTiming | None:
        """Its timing, until now if it is not durable yet.

        None if it failed, or if the trainer wrote it itself and waited.
        """
        ended = (now, step) if not self.done else self._ended
        if ended is None or ended[0] <= self._began:
            return None
        return WriteTiming(self._began, self._began_step, *ended)
