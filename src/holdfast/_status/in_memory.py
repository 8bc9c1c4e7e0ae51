"""What a dead run has left in shared memory, as far as a start could go on from it.

Of a run of several ranks every rank has left a part, and a state counts only where all the
parts are there: one alone is no state.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast._record.image import decode_scalars
from holdfast._record.line import is_on_line
from holdfast._resume.find import open_leftovers

if TYPE_CHECKING:
    from holdfast._save.arena import Arena, SlotRecord


@dataclass(frozen=True, slots=True, order=True)
class InMemory:
    """A state that every rank has left its part of."""

    attempt: int
    mark: int
    captured_at: float

    @property
    def step(self) -> int:
        return self.mark // 2


def states_in_memory(
    run_id: str, line: dict[int, int | None], *, are_checked: bool = True
) -> list[InMemory]:
    """The states on the run's own line, the newest last.

    While a run trains, its newest snapshots are without checksums so far.
    """
    parts: dict[tuple[int, int, int], dict[int, float]] = {}
    for leftover in open_leftovers(run_id):
        arena = leftover.arena
        for record in on_this_line(arena, line):
            if are_checked and not record.is_hashed:
                continue
            key = (arena.attempt, record.mark, world_of(arena, record))
            parts.setdefault(key, {})[leftover.rank] = record.captured_at
        arena.close()
    return sorted(
        InMemory(attempt, mark, max(ranks.values()))
        for (attempt, mark, size), ranks in parts.items()
        if set(ranks) == set(range(size))
    )


def on_this_line(arena: Arena, line: dict[int, int | None]) -> list[SlotRecord]:
    """The whole snapshots of an arena that belong to the run's own line."""
    return [r for r in arena.whole() if is_on_line(line, arena.attempt, r.step)]


def world_of(arena: Arena, record: SlotRecord) -> int:
    """How many ranks a snapshot is of."""
    size = head_of(arena, record).get("world", 1)
    return size if isinstance(size, int) else 1


def head_of(arena: Arena, record: SlotRecord) -> dict[str, Any]:
    """What stands beside the tensors of a snapshot; nothing if it cannot be read."""
    with contextlib.suppress(ValueError):
        place = arena.plan(record.slot).scalars
        image = arena.image(record.slot)
        return decode_scalars(image[place.offset : place.offset + place.size_bytes])
    return {}
