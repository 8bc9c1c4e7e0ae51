"""A run of holdfast without torch: its boundaries say all."""

from __future__ import annotations

from holdfast._tools.prove.report import plain_text

SCRIPT = """
import numpy as np
import holdfast

weights, speed = np.zeros(50), np.zeros(50)
rng = np.random.default_rng(3)
with holdfast.Run("runs/here", weights=weights, rng=rng{more}) as run:
    for step in run.steps(60):
        speed *= 0.9
        speed += rng.normal(size=50)
        weights += 0.1 * speed
        run.log(size=float(abs(weights).sum()))
"""


def test_a_run_that_was_told_of_all_its_state_is_equal(prove):
    proof = prove(SCRIPT.format(more=", speed=speed"), kills=6, seed=3)
    assert proof.verdict == "equal", plain_text(proof)
    assert proof.steps == 60
    assert any("60 boundaries" in words for words in proof.compared), plain_text(proof)


def test_what_it_was_not_told_of_is_noticed_at_the_next_boundary(prove):
    proof = prove(SCRIPT.format(more=""), kills=6, seed=3)
    assert proof.difference is not None, plain_text(proof)
    assert proof.difference.cause == "state-not-named"
    assert proof.difference.item == "state weights"
    interruption = next(i for i in proof.interruptions if i.number == proof.difference.after)
    assert proof.difference.step == (interruption.resumed_at or 0) + 1, plain_text(proof)
