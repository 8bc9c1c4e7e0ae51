"""`holdfast doctor -- torchrun …`: the real ranks meet, and add up real numbers."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from holdfast._tools.doctor.ranks import check_ranks

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux and its /proc")
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text("open('trained', 'w')")
    return tmp_path


@pytest.mark.nightly
def test_two_ranks_meet(place):
    command = [TORCHRUN, "--standalone", "--nproc-per-node=2", "train.py"]
    found = {each.name: each for each in check_ranks(command, folder=place)}
    check = found["all_reduce"]
    assert check.state == "ok", check
    assert check.data["ranks"] == 2
    assert check.data["backend"] in ("gloo", "nccl")
    assert not (place / "trained").exists()
    assert not list((place / "tmp").iterdir())


def test_one_process_has_nobody_to_reduce_with(place):
    (place / "job.sh").write_text(f"'{sys.executable}' train.py\ntouch after\n")
    [check] = check_ranks(["bash", "job.sh"], folder=place)
    assert (check.state, "one process" in check.found) == ("ok", True)
    assert not (place / "trained").exists()
    assert not (place / "after").exists(), "the script went on behind its training"
