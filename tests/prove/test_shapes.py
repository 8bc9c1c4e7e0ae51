"""The shapes of public scripts, each with one known fault: the cause named is the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._tools.prove.report import plain_text
from tests.often import few

SHAPES = Path(__file__).parent / "shapes"
# The cause, and what the report says first.
CAUSES = {
    "prefetched_batch": ("state-not-saved", "input X of the model"),
    "prefetched_and_left_out": ("state-not-saved", "input X of the model"),
    "hidden_state": ("state-not-named", "input hidden[0] of the model"),
    "shuffling_generator": ("generator-not-restored", "random generator torch"),
    "replay_memory": ("state-not-saved", "len(memory.memory)"),
    "pointer_in_a_module": ("state-not-saved", "variable model.pointer"),
    "own_numpy_generator": ("generator-not-restored", "random generator mixup.rng"),
    "growing_length": ("state-not-saved", "variable length"),
}


@pytest.mark.parametrize(
    "name", few(CAUSES, ("prefetched_batch", "hidden_state", "shuffling_generator"))
)
def test_the_cause_named_is_the_cause(name, prove):
    proof = prove(SHAPES / f"{name}.py", kills=6, seed=7)
    assert proof.verdict == "differs", plain_text(proof)
    assert proof.difference is not None
    assert (proof.difference.cause, proof.difference.item) == CAUSES[name], plain_text(proof)
