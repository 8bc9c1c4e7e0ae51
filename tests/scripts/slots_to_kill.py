"""Snapshots whose slots come and go, without a run: prints `whole STEP` after each one.

    slots_to_kill.py RUN_ID

HOLDFAST_FAULT names the stage at which it dies.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from holdfast._run.saving import arena_builder, slot_memory, snapshots
from holdfast._state.capture import capture
from holdfast._store.memory.arena import Arena

COUNT = 50_000


def main() -> None:
    arena_builder._SMALL_BYTES = 0  # a state of 0.4 MB as if it were a large one
    snapshots._LINGER_SECONDS = slot_memory._ASK_SECONDS = 0.0
    arenas: list[Arena] = []
    weights = np.zeros(COUNT)
    taker = snapshots.Snapshots(
        run_id=sys.argv[1],
        attempt=1,
        announce=lambda arena, _: arenas.append(arena),
        say=print,
    )

    def take(step: int) -> snapshots.Taken:
        weights[:] = step
        deadline = time.monotonic() + 20
        while True:
            taken = taker.take(capture({"weights": weights}), {}, 2 * step)
            if taken is not None:
                break
            assert time.monotonic() < deadline
            time.sleep(0.001)
        print("whole", step, flush=True)
        arena = arenas[-1]
        arena.set_digests(taken.slot, taken.sequence, [b"d" * 16] * arena.ranges)
        return taken

    def wait_for_slots(number: int) -> None:
        deadline = time.monotonic() + 20
        while len(arenas[-1].present()) != number or taker._current.memory.is_at_work:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    for step in (1, 2):
        take(step)
    wait_for_slots(2)
    written = take(3)
    taker.promise(written)  # the keeper writes it to disk
    for step in (4, 5, 6):
        take(step)
    wait_for_slots(3)
    taker.release_slot(written.sequence)
    take(7)
    wait_for_slots(2)
    for step in (8, 9):
        take(step)
    print("done", flush=True)
    sys.stdin.read()  # until the test has seen it


if __name__ == "__main__":
    main()
