"""Jobs of several ranks: all are compared; a signal meets one, whatever started them, or all."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from holdfast._tools.prove.proof import ProofRequest, Watcher
from holdfast._tools.prove.prove import prove
from holdfast._tools.prove.report import plain_text
from holdfast._tools.prove.results import compare_runs, unlike_generators
from tests.support import arena_files, keepers, wait_until

pytest.importorskip("torch", reason="pip install torch")

SCRIPT = Path(__file__).parent / "ranks" / "ddp.py"
RUN = Path(__file__).parent / "ranks" / "run_ddp.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
LAUNCH = (*TORCHRUN, "--nproc-per-node=2")
UNDISTURBED = ("reference", "again")
IN_EARNEST = ("INT", "TERM", "USR2", "KILL")


def targets(proof):
    return {(each.signal, (each.target or "").partition(" ")[0]) for each in proof.interruptions}


@pytest.mark.nightly  # tests/ranks has two ranks
@pytest.mark.timeout(300)
def test_a_run_of_two_ranks_is_equal_whomever_a_signal_meets(prove):
    proof = prove(RUN, "--start", "fork", kills=6, signals=IN_EARNEST)
    assert proof.verdict == "equal", plain_text(proof)
    assert proof.ranks == 2
    assert {("KILL", "rank"), ("KILL", "the"), ("INT", "all")} <= targets(proof), plain_text(proof)


@pytest.mark.nightly  # only here: two ranks under prove take half a minute
@pytest.mark.timeout(300)
def test_ranks_of_torchrun_go_on_after_a_kill_of_one_and_of_torchrun(tmp_path):
    shutil.copy(RUN, tmp_path / "train.py")
    wishes = ProofRequest((*LAUNCH, "train.py"), kills=2, signals=("KILL",), folder=tmp_path)
    proof = prove(wishes, Watcher())
    assert proof.verdict == "equal", plain_text(proof)
    assert targets(proof) == {("KILL", "rank"), ("KILL", "the")}, plain_text(proof)


@pytest.mark.nightly  # the long form of the one above
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param((*TORCHRUN, "--nproc-per-node=4", "train.py"), id="torchrun"),
        pytest.param((sys.executable, "train.py", "--ranks", "4"), id="spawn"),
    ],
)
def test_fifty_interruptions_of_four_ranks_change_no_bit(command, tmp_path):
    project = tmp_path / "project"
    project.mkdir()
    shutil.copy(RUN, project / "train.py")
    keep = tmp_path / "kept"
    words = (*command, "--epochs", "10")
    wishes = ProofRequest(words, kills=50, signals=IN_EARNEST, seed=1, keep=keep, folder=project)
    proof = prove(wishes, Watcher())
    assert proof.verdict == "equal", plain_text(proof)
    assert len(proof.interruptions) == 50, plain_text(proof)
    assert targets(proof) == {
        (name, whom) for name in IN_EARNEST for whom in ("rank", "the", "all")
    }, plain_text(proof)
    reference, again = (next(keep.glob(f"{name}/*/run")) for name in UNDISTURBED)
    unseeded = unlike_generators(reference, again)
    assert not any(name.startswith("torch") for name in unseeded)
    for run in keep.glob("interrupted-*/*/run"):
        assert compare_runs(reference, run, unseeded) is None
        wait_until(lambda run=run: not keepers(run), 60, "the end of the keepers")
        assert arena_files(run) == []


@pytest.mark.nightly  # as above, without holdfast.Run
@pytest.mark.timeout(300)
def test_two_ranks_that_resume_rightly_are_equal(tmp_path):
    shutil.copy(SCRIPT, tmp_path / "train.py")
    wishes = ProofRequest((*LAUNCH, "train.py"), kills=2, signals=("KILL", "TERM"), folder=tmp_path)
    proof = prove(wishes, Watcher())
    assert proof.verdict == "equal", plain_text(proof)
    assert proof.ranks == 2
    assert len(proof.interruptions) == 2


@pytest.mark.nightly  # test_faults.py has it of one process
@pytest.mark.timeout(300)
def test_what_one_rank_forgets_is_found(tmp_path):
    text = SCRIPT.read_text()
    broken = text.replace(
        "            if number < used:\n", "            if number < used and not rank:\n"
    )
    assert broken != text
    (tmp_path / "train.py").write_text(broken)
    wishes = ProofRequest(
        (*LAUNCH, "train.py"), kills=1, signals=("KILL",), seed=3, folder=tmp_path
    )
    proof = prove(wishes, Watcher())
    assert proof.verdict == "differs", plain_text(proof)
    assert proof.difference is not None
    assert proof.difference.rank == 1, plain_text(proof)
    assert proof.difference.cause == "data-position-lost", plain_text(proof)
