"""A killed run goes on from its last snapshot, to the same bits."""

from __future__ import annotations

from tests.support import arena_files, traced_steps, wait_for_keeper_gone, wait_until


def test_a_killed_training_goes_on_to_the_same_bits(folder, tmp_path, start, reference):
    trace = tmp_path / "trace"
    trace.touch()
    first = start(folder, "--total", 400, "--sleep", 0.005, "--trace", trace)
    first.ready()
    wait_until(lambda: len(traced_steps(trace)) > 100)
    first.kill()
    first.wait()
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    second = start(folder, "--total", 400)
    assert second.ready() > 0
    assert second.state_hash() == reference(400)
