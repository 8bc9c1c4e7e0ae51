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

IN_EPOCHS = """
import time
import numpy as np
import holdfast

weights = np.zeros(50)
with holdfast.Run("runs/here", weights=weights) as run:
    for _ in run.epochs(4):
        for batch in run.batches(range(10)):
            weights += batch
            time.sleep(0.01)
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


def test_the_steps_of_the_report_are_those_of_the_run(prove):
    proof = prove(IN_EPOCHS, kills=3, seed=3, signals=("TERM",))
    assert proof.verdict == "equal", plain_text(proof)
    assert proof.steps == 40  # and four ends of epochs
    for each in proof.interruptions:  # a stop finishes its step, and loses none
        assert each.resumed_at - each.step in (0, 1), plain_text(proof)
    assert not any("repeated" in note for note in proof.notes), plain_text(proof)
