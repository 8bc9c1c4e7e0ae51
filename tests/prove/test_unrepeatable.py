"""A script that is not repeatable by itself is told so, with the first step and the cause."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from holdfast._tools.prove.proof import ProofRequest, Watcher
from holdfast._tools.prove.prove import prove
from holdfast._tools.prove.report import plain_text

HERE = Path(__file__).parent
SCRIPTS = HERE / "unrepeatable"
ORDER_OF_A_SET = """
import numpy as np
import holdfast

rng = np.random.default_rng(3)
names = {"query", "key", "value", "gate", "mix", "norm", "out"}
made = {name: rng.normal(size=8) for name in names}
weights = np.stack([made[name] for name in sorted(made)])
with holdfast.Run("runs/here", weights=weights) as run:
    for step in run.steps(8):
        weights *= 0.9
"""
WORDS = 11  # in the set; all of them are in order once in 40 million times
CAUSES = {
    "no_seed": "unseeded-generator",
    "seed_from_clock": "time-or-pid-in-seed",
    "order_of_a_set": "data-order-not-fixed",
}


@pytest.mark.nightly  # its words are in test_report.py
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n == "no_seed" else [pytest.mark.nightly]) for n in CAUSES],
)
def test_an_unrepeatable_script_is_told_so_and_compared_within_its_spread(name, tmp_path):
    # A process of its own for each life: forks of one would draw the same "random" numbers.
    shutil.copy(SCRIPTS / f"{name}.py", tmp_path / "train.py")
    command = (sys.executable, "train.py")
    proof = prove(
        ProofRequest(command, kills=2, signals=("TERM", "KILL"), folder=tmp_path), Watcher()
    )
    assert proof.verdict == "not repeatable", plain_text(proof)
    assert proof.exit_status == 3
    assert proof.unrepeatable is not None
    assert proof.unrepeatable.cause == CAUSES[name], plain_text(proof)
    assert proof.unrepeatable.step is not None
    if name == "order_of_a_set":
        # Two orders may by chance begin alike, or be much alike as a whole.
        assert proof.unrepeatable.step <= WORDS
        assert proof.within_spread is not None
    else:
        assert proof.unrepeatable.step == 1
        assert proof.within_spread is True, plain_text(proof)


@pytest.mark.nightly
def test_the_order_of_a_set_is_no_unseeded_generator(tmp_path):
    # Over 5 s: each life is a process of its own, with its own order of sets.
    (tmp_path / "train.py").write_text(ORDER_OF_A_SET)
    check_order_of_a_set(tmp_path, kills=1)


@pytest.mark.nightly  # in torch; test_the_order_of_a_set_is_no_unseeded_generator shows the same
def test_the_order_of_a_set_is_no_unseeded_generator_in_torch(tmp_path):
    shutil.copy(HERE / "shapes" / "order_of_a_set.py", tmp_path / "train.py")
    check_order_of_a_set(tmp_path, kills=2)


def check_order_of_a_set(folder, kills):
    command = (sys.executable, "train.py")
    proof = prove(ProofRequest(command, kills=kills, signals=("KILL",), folder=folder), Watcher())
    assert proof.unrepeatable is not None, plain_text(proof)
    assert proof.unrepeatable.cause == "data-order-not-fixed", plain_text(proof)
    assert any("PYTHONHASHSEED" in note for note in proof.notes), plain_text(proof)
