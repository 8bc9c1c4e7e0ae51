"""Snapshots with a frozen tensor that changes in step 4: prints `whole STEP` after each one.

    shared_slots_to_kill.py RUN_ID

HOLDFAST_FAULT names the stage at which it dies.
"""

from __future__ import annotations

import sys
import threading

import torch

from holdfast._run.saving import arena_builder, slot_memory, snapshots
from holdfast._state.capture_cache import CaptureCache
from holdfast._store.commit import fault_points
from holdfast._store.memory.arena import Arena

COUNT = 2_000_000
FIRST_IS_PRINTED = threading.Event()


def fault_point_after_the_first_line(stage: str) -> None:
    """The second slot is built in a thread: it may be ready before the first line is printed."""
    if stage.startswith("slot-1"):
        assert FIRST_IS_PRINTED.wait(20)
    fault_points.fault_point(stage)


def main() -> None:
    arena_builder._SMALL_BYTES = 0
    slot_memory.fault_point = fault_point_after_the_first_line
    arenas: list[Arena] = []
    base = torch.nn.Parameter(torch.zeros(COUNT), requires_grad=False)
    model = torch.nn.ParameterDict({"base": base, "adapter": torch.nn.Parameter(torch.zeros(1000))})
    taker = snapshots.Snapshots(
        run_id=sys.argv[1],
        attempt=1,
        announce=lambda arena, _: arenas.append(arena),
        say=print,
    )
    cache = CaptureCache()
    for step in range(1, 9):
        with torch.no_grad():
            model["adapter"].fill_(step)
            base.fill_(float(step >= 4))
        captured = cache.capture({"model": model}, {})
        taken = taker.take(captured, {}, 2 * step, patience_seconds=20)
        assert taken is not None
        print("whole", step, flush=True)
        FIRST_IS_PRINTED.set()
        arenas[-1].set_digests(taken.slot, taken.sequence, [b"d" * 16] * arenas[-1].ranges)
        while taker.is_building:
            pass
        if step == 3:
            assert arenas[-1].shared
    assert not arenas[-1].shared
    print("done", flush=True)
    sys.stdin.read()  # until the test has seen it


if __name__ == "__main__":
    main()
