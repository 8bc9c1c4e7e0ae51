"""`holdfast export` of several ranks: what they share is there once, what is sharded is whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.command import holdfast, succeed
from tests.rank_folders import capture_of, make_run

torch = pytest.importorskip("torch", reason="pip install torch")

WHOLE = torch.arange(10.0).reshape(5, 2)


def shard_of(rank: int):
    """Rows 0 to 2 of a tensor on rank 0, the others on rank 1; and a bias that only 0 stores."""
    first, last = (0, 3) if rank == 0 else (3, 5)
    captured = capture_of({"model": {"w": WHOLE[first:last].clone(), "tied": None}, "own": rank})
    place = {"size": [5, 2], "dtype": "float32", "offsets": [first, 0], "sizes": [last - first, 2]}
    leaf = {"$shard": {"t": 0, **place, "mesh": 0}}
    captured.tree["state"]["model"] = {"w": leaf, "tied": leaf}
    return captured


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", [shard_of(0), shard_of(1)])


def test_sharded_tensors_are_made_whole_for_safetensors(run, tmp_path):
    from safetensors.torch import load_file

    shown = succeed("export", run, tmp_path / "out.safetensors")
    assert "Put together from 2 ranks; what each has of its own is rank 0's." in shown
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["model.w"], WHOLE)
    assert torch.equal(found["model.tied"], WHOLE)


def test_sharded_tensors_are_made_whole_for_torch_and_stay_tied(run, tmp_path):
    succeed("export", run, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(found["model"]["w"], WHOLE)
    assert found["model"]["w"].data_ptr() == found["model"]["tied"].data_ptr()
    assert found["own"] == 0


def test_a_part_that_no_rank_stored_is_no_export(tmp_path):
    run = make_run(tmp_path / "run", [shard_of(0), shard_of(0)])
    done = holdfast("export", run, tmp_path / "out.pt")
    assert done.returncode != 0
    assert "are not the whole" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.pt").exists()


def test_without_torch_a_sentence_names_the_way(run, tmp_path):
    out = tmp_path / "out.safetensors"
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\n"
        "from holdfast._tools.convert.export import export\n"
        "from holdfast._tools.convert.writers import ExportRequest\n"
        f"export(Path({str(run)!r}), ExportRequest(Path({str(out)!r})))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "model.w is sharded, and putting it together needs PyTorch" in done.stderr
    assert "pip install 'torch>=2.4'" in done.stderr


def test_a_file_of_another_rank_that_is_damaged_is_passed_over(run, tmp_path):
    damaged = next(run.glob("checkpoints/*/rank-00001.safetensors"))
    damaged.unlink()
    done = holdfast("export", run, tmp_path / "out.pt")
    assert done.returncode != 0
    assert "none of its 1 checkpoints is whole" in done.stderr
