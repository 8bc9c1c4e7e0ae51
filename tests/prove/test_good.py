"""Checkpoint code that is right is called right: by scripts of many shapes, and with holdfast."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._tools.prove.report import plain_text
from tests.often import few

HERE = Path(__file__).parent
GOOD = sorted(path.stem for path in (HERE / "good").glob("*.py"))
FORGOTTEN = {
    "averaged_weights": "average",
    "learning_rate": "scheduler",
    "second_optimizer": "optimizer",
}


# Over 5 s: a proof with eight interruptions.
@pytest.mark.parametrize(
    "name", few([name for name in GOOD if name != "resume_option"], ("plain_loop",))
)
def test_a_good_script_is_equal(name, prove):
    proof = prove(HERE / "good" / f"{name}.py", kills=8, seed=7)
    assert proof.verdict == "equal", plain_text(proof)
    assert len(proof.interruptions) >= 6


@pytest.mark.parametrize("name", few(FORGOTTEN, ("learning_rate",)))
def test_what_a_run_was_not_told_of_is_named(name, prove):
    proof = prove(HERE / "forgotten" / f"{name}.py", kills=6, seed=7)
    assert proof.verdict == "differs", plain_text(proof)
    assert proof.difference is not None
    assert proof.difference.cause == "state-not-named", plain_text(proof)
    assert FORGOTTEN[name] in proof.difference.item, plain_text(proof)
