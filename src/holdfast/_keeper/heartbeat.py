"""What a heartbeat contains about the trainer and the snapshots in memory."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from pathlib import Path
from typing import Any

from holdfast._keeper.mapped_arenas import HeldArena
from holdfast._store.memory import control
from holdfast._store.memory.arena import SlotRecord, used_bytes

_RECENT_SECONDS = 60.0
_BEATS = 64  # at least _RECENT_SECONDS / BEAT_SECONDS
_DECAY_PER_POLL = 0.9995  # four polls a second: half of it in six minutes


class StepPace:
    """How long a step takes, on the safe side: the longest of recent ones."""

    def __init__(self) -> None:
        self.step_seconds: float | None = None
        self._seen: tuple[float, int] | None = None

    def rest(self) -> None:
        """No step is being made."""
        self._seen = None

    def observe(self, now: float, step: int, boundary_ns: int) -> None:
        """Record the trainer's step within its loop."""
        before, self._seen = self._seen, (now, step)
        if before is None or boundary_ns == 0:
            return
        if step > before[1]:
            # The mean: the observed step may have taken longer than those in between.
            seconds = (now - before[0]) / (step - before[1])
        else:
            seconds = now - max(before[0], boundary_ns / 1e9)
            self._seen = before
        self.step_seconds = max(seconds, _DECAY_PER_POLL * (self.step_seconds or 0.0))


class Change:
    """Memory in undisturbed times against now, and recent compilations."""

    def __init__(self) -> None:
        self._usual_bytes: int | None = None
        self._compiles: deque[tuple[float, int]] = deque(maxlen=_BEATS)

    def observe(self, now: float, sample: dict[str, Any] | None, words: Any) -> dict[str, Any]:
        """Record one heartbeat; returns what it contains of this."""
        used = sample or {}
        parts = [used.get(name) for name in ("rss", "workers")]
        size = sum(part for part in parts if isinstance(part, int)) or None
        if size is not None and not words[control.DISTURBED] & control.SLOWING:
            self._usual_bytes = size
        made = int(words[control.COMPILES])
        self._compiles.append((now, made))
        while now - self._compiles[0][0] > _RECENT_SECONDS:
            self._compiles.popleft()
        return {
            "memory": {"usual": self._usual_bytes, "now": size},
            "compiles_lately": made - self._compiles[0][1],
        }


def standing_of(words: Any) -> dict[str, Any]:
    """The trainer's position, from the shared words."""
    return {
        "step": int(words[control.STEP]),
        "boundary_age_seconds": age_of(int(words[control.BOUNDARY_NS])),
        "epoch": int(words[control.EPOCH]) or None,
        "epochs": int(words[control.EPOCHS]) or None,
    }


def held_of(newest: tuple[HeldArena, SlotRecord] | None) -> dict[str, Any]:
    """The newest snapshot in memory, the slots that have memory, and how much it is."""
    slots = slots_bytes = None
    if newest is not None:
        arena = newest[0].arena
        with contextlib.suppress(OSError, ValueError):  # another thread has just closed it
            slots, slots_bytes = len(arena.present()), used_bytes(arena.descriptor)
    return {
        "memory_step": None if newest is None else newest[1].step,
        "memory_time": None if newest is None else newest[1].captured_at,
        "slots": slots,
        "slots_bytes": slots_bytes,
        "in_shm": newest is not None and newest[0].path is not None,
    }


def is_looked_at(pid: int) -> bool:
    """True if a process is stopped or traced."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        return fields.get("TracerPid", "0") != "0" or fields.get("State", "R")[0] in "Tt"
    return False


def state_of(pid: int) -> str:
    """The kernel's letter for the state of a process; empty if it is gone."""
    with contextlib.suppress(OSError, IndexError):
        return chr(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][0])
    return ""


def age_of(monotonic_ns: int) -> float | None:
    """The seconds since a time of the monotonic clock; None if it was not set."""
    return None if not monotonic_ns else round((time.monotonic_ns() - monotonic_ns) / 1e9, 2)
