"""The ten faults and the good scripts with many seeds: what is found must not depend on luck."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._tools.prove.report import plain_text
from tests.prove.renaming import rename
from tests.prove.test_faults import CAUSES
from tests.prove.test_good import GOOD

HERE = Path(__file__).parent
SEEDS = range(20, 30)
pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", CAUSES)
def test_a_fault_is_found_with_any_seed(name, seed, prove):
    text = (HERE / "faults" / f"{name}.py").read_text()
    proof = prove(rename(text) if seed % 2 else text, kills=20, seed=seed)
    assert proof.difference is not None, plain_text(proof)
    assert proof.difference.cause == CAUSES[name], plain_text(proof)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [name for name in GOOD if name != "resume_option"])
def test_a_good_script_is_equal_with_any_seed(name, seed, prove):
    proof = prove(HERE / "good" / f"{name}.py", kills=20, seed=seed)
    assert proof.verdict == "equal", plain_text(proof)
