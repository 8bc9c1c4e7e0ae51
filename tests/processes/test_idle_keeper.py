"""A keeper that has nothing to do uses no processor, whatever its trainer has closed."""

from __future__ import annotations

import time

from tests.support import keepers, wait_until

SCRIPT = """
import os, signal, sys
import holdfast
run = holdfast.Run(sys.argv[1], number=1)
run.__enter__()
for _ in range(3):
    run.boundary()
os.close(signal.set_wakeup_fd(-1))  # as a library does that takes over the signals
print("closed", flush=True)
signal.pause()
"""
LOOK_SECONDS, MOST_SECONDS = 0.5, 0.02


def test_a_keeper_whose_trainer_has_closed_its_signals_does_not_spin(folder, start, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    trainer = start(folder, script=script)
    trainer.wait_for("closed")
    (keeper,) = wait_until(lambda: keepers(folder), 30, "the keeper")

    def rests() -> bool:
        before = sum(keeper.cpu_times()[:2])
        time.sleep(LOOK_SECONDS)  # what is measured, not what is waited for
        return sum(keeper.cpu_times()[:2]) - before <= MOST_SECONDS

    # At its start it has something to do; one that spins has its share of every moment after.
    wait_until(rests, 15, "a moment in which the keeper rests")
