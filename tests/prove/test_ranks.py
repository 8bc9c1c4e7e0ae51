"""Jobs of several ranks, started by torchrun: both are compared, a kill hits one of them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from holdfast._prove.proof import Watcher, Wishes
from holdfast._prove.prove import prove
from holdfast._prove.report import plain_text

pytest.importorskip("torch", reason="pip install torch")

SCRIPT = Path(__file__).parent / "ranks" / "ddp.py"
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.slow
def test_two_ranks_that_resume_rightly_are_equal(tmp_path):
    shutil.copy(SCRIPT, tmp_path / "train.py")
    wishes = Wishes((*LAUNCH, "train.py"), kills=2, signals=("KILL", "TERM"), folder=tmp_path)
    proof = prove(wishes, Watcher())
    assert proof.verdict == "equal", plain_text(proof)
    assert proof.ranks == 2
    assert len(proof.interruptions) == 2


@pytest.mark.slow
def test_what_one_rank_forgets_is_found(tmp_path):
    text = SCRIPT.read_text()
    broken = text.replace(
        "            if number < used:\n", "            if number < used and not rank:\n"
    )
    assert broken != text
    (tmp_path / "train.py").write_text(broken)
    wishes = Wishes((*LAUNCH, "train.py"), kills=1, signals=("KILL",), seed=3, folder=tmp_path)
    proof = prove(wishes, Watcher())
    assert proof.verdict == "differs", plain_text(proof)
    assert proof.difference is not None
    assert proof.difference.rank == 1, plain_text(proof)
    assert proof.difference.cause == "data-position-lost", plain_text(proof)
