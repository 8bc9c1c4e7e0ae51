"""What a heartbeat tells of the trainer and of what is in memory."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from holdfast._keeper.held import HeldArena
from holdfast._save import control
from holdfast._save.arena import SlotRecord


def standing_of(words: Any) -> dict[str, Any]:
    """Where the trainer is, by the words it shares."""
    return {
        "step": int(words[control.STEP]),
        "boundary_age_seconds": _age(int(words[control.BOUNDARY_NS])),
        "epoch": int(words[control.EPOCH]) or None,
        "epochs": int(words[control.EPOCHS]) or None,
    }


def held_of(newest: tuple[HeldArena, SlotRecord] | None) -> dict[str, Any]:
    """What is in memory."""
    return {
        "memory_step": None if newest is None else newest[1].step,
        "memory_time": None if newest is None else newest[1].captured_at,
        "slots": None if newest is None else newest[0].arena.slots,
        "in_shm": newest is not None and newest[0].path is not None,
    }


def is_looked_at(pid: int) -> bool:
    """Whether a process is stopped, or a debugger has it."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        return fields.get("TracerPid", "0") != "0" or fields.get("State", "R")[0] in "Tt"
    return False


def _age(boundary_ns: int) -> float | None:
    return None if boundary_ns == 0 else round((time.monotonic_ns() - boundary_ns) / 1e9, 2)
