"""A killed run goes on from its last snapshot, to the same bits."""

from __future__ import annotations

from tests.support import arena_files, wait_for_keeper_gone


def test_a_killed_training_goes_on_to_the_same_bits(folder, start, reference):
    first = start(folder, "--total", 400, "--sleep", 0.005)
    first.ready()
    first.wait_for("ready")
    import time

    time.sleep(0.5)
    first.kill()
    first.wait()
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    second = start(folder, "--total", 400)
    assert second.ready() > 0
    assert second.state_hash() == reference(400)
