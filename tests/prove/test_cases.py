"""Scripts that are easily misjudged: what only looks forgotten, and what is well hidden."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast._tools.prove.proof import ProofRequest, Watcher
from holdfast._tools.prove.prove import prove as prove_wishes
from holdfast._tools.prove.report import plain_text
from tests.often import few

CASES = Path(__file__).parent / "cases"
RIGHT = sorted(path.stem for path in (CASES / "right").glob("*.py"))
CAUSES = {
    "adaptive_coefficient": {"state-not-saved"},
    "average_in_a_callback": {"ema-not-saved"},
    "epoch_made_twice": {"other-number-of-steps"},
    "patience": {"other-number-of-steps"},
    "random_of_python": {"generator-not-restored"},
    "running_statistics": {"buffers-not-saved"},
    "saved_before_the_scheduler": {"off-by-one-step"},
    "torn_and_ignored": {"torn-checkpoint"},
    # The files are of different steps, and either may be called the wrong one.
    "two_files": {"optimizer-state-lost", "weights-not-restored"},
}


def test_every_wrong_case_is_tried_here():
    assert {path.stem for path in (CASES / "wrong").glob("*.py")} == set(CAUSES)


@pytest.mark.parametrize("name", few(RIGHT, RIGHT[:1]))
def test_what_only_looks_forgotten_is_equal(name, prove):
    proof = prove(CASES / "right" / f"{name}.py", kills=6, seed=7)
    assert proof.verdict == "equal", plain_text(proof)


@pytest.mark.parametrize("name", few(CAUSES, ("patience",)))
def test_what_is_well_hidden_is_found_and_named(name, prove):
    proof = prove(CASES / "wrong" / f"{name}.py", kills=8, seed=7)
    assert proof.verdict == "differs", plain_text(proof)
    assert proof.difference is not None
    assert proof.difference.cause in CAUSES[name], plain_text(proof)


@pytest.mark.nightly  # the table above has the same fault in the script itself
def test_what_stands_in_a_module_of_the_project_is_seen(frameworks, tmp_path):
    folder = tmp_path / "project"
    shutil.copytree(CASES / "folder", folder, ignore=shutil.ignore_patterns("__pycache__"))
    wishes = ProofRequest(("python", "train.py"), kills=8, seed=7, folder=folder)
    proof = prove_wishes(wishes, Watcher(), frameworks.starter("torch"))
    assert proof.verdict == "differs", plain_text(proof)
    assert proof.difference is not None
    assert proof.difference.cause == "ema-not-saved", plain_text(proof)
