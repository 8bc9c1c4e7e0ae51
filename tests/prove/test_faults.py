"""Ten faults of checkpoint code, each found and named, whatever the script calls its things."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._tools.prove.report import plain_text
from tests.often import few
from tests.prove.renaming import rename

FAULTS = Path(__file__).parent / "faults"
CAUSES = {
    "scheduler_not_saved": "scheduler-not-saved",
    "sampler_reset": "data-position-lost",
    "generator_not_restored": "generator-not-restored",
    "scaler_forgotten": "scaler-not-saved",
    "ema_not_saved": "ema-not-saved",
    "off_by_one_step": "off-by-one-step",
    "torn_checkpoint": "torn-checkpoint",
    "workers_reseeded": "workers-reseeded",
    "optimizer_moments_lost": "optimizer-state-lost",
    "saved_in_handler": "saved-in-mid-step",
}

RENAMED = list(CAUSES)


def test_every_fault_is_tried_here():
    assert {path.stem for path in FAULTS.glob("*.py")} == set(CAUSES)


@pytest.mark.parametrize("name", few(CAUSES, ("ema_not_saved", "optimizer_moments_lost")))
def test_a_planted_fault_is_found_and_named(name, prove):
    proof = prove(FAULTS / f"{name}.py", kills=8, seed=7)
    assert proof.verdict == "differs", plain_text(proof)
    assert proof.difference is not None
    assert proof.difference.cause == CAUSES[name], plain_text(proof)


@pytest.mark.nightly  # above with their own names
@pytest.mark.parametrize("name", RENAMED)
def test_it_is_found_with_all_names_changed(name, prove):
    renamed = rename((FAULTS / f"{name}.py").read_text())
    proof = prove(renamed, kills=8, seed=8)
    assert proof.verdict == "differs", plain_text(proof)
    assert proof.difference is not None
    assert proof.difference.cause == CAUSES[name], plain_text(proof)
