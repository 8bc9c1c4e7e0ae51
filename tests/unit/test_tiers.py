"""The table of layers and parts, and what is chosen from it."""

from __future__ import annotations

import fnmatch
import io
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import environment
import tiers

sys.path.remove(str(ROOT / "tools"))
FOLDERS = ("docs", "examples", "requirements", "src", "tests")
FILES = [str(p.relative_to(ROOT)) for name in FOLDERS for p in (ROOT / name).rglob("*")]
FILES += [path.name for path in ROOT.iterdir()]
LAYERS, PARTS = environment.read_layers(), tiers.read_parts()


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_names_is_there(name):
    layer = LAYERS[name]
    for requirement in layer["requirements"]:
        assert (ROOT / "requirements" / f"{requirement}.txt").is_file()
    assert layer.get("on") in (None, *LAYERS)
    for pattern in layer.get("files", []):
        assert list(ROOT.glob(pattern)), pattern


@pytest.mark.parametrize("name", PARTS)
def test_what_a_part_names_is_there(name):
    part = PARTS[name]
    assert part["layer"] in LAYERS
    for folder in part.get("tests", []):
        assert (ROOT / folder).is_dir(), folder
    for pattern in part["paths"]:
        assert fnmatch.filter(FILES, pattern), pattern


def test_every_layer_with_tests_is_run_by_a_part():
    with_tests = {name for name, layer in LAYERS.items() if "files" in layer}
    assert with_tests - {part["layer"] for part in PARTS.values()} == {"gpu"}


def test_every_folder_of_the_layer_test_is_in_a_nightly_part():
    listed = {folder for part in PARTS.values() for folder in part.get("tests", [])}
    folders = {f"tests/{path.parent.name}" for path in ROOT.glob("tests/*/test_*.py")}
    others = {"tests/browser", "tests/gpu", "tests/slurm"}
    assert folders - others == listed


def test_the_nightly_workflow_runs_every_part():
    text = (ROOT / ".github/workflows/nightly.yml").read_text()
    (line,) = (line for line in text.splitlines() if "part: [" in line)
    assert line.partition("[")[2].rstrip("]").split(", ") == list(PARTS)


def test_a_change_affects_the_parts_that_it_can_break():
    assert "jax" in tiers.affected(["src/holdfast/jax/arrays.py"], PARTS)
    assert tiers.affected(["docs/start.md"], PARTS) == ["docs", "blocks"]
    assert {"jax", "kills"} <= set(tiers.affected(["src/holdfast/_state/capture.py"], PARTS))
    assert tiers.affected(["LICENSE"], PARTS) == []
    assert tiers.affected(None, PARTS) == list(PARTS)


def test_what_is_chosen_fits_into_the_budget_in_the_order_of_the_table():
    chosen = tiers.fitting(list(PARTS), PARTS)
    assert chosen[0] == next(iter(PARTS))
    assert 0 < sum(PARTS[name]["minutes"] for name in chosen) <= tiers.BUDGET_MINUTES
    left_out = [name for name in PARTS if name not in chosen]
    room = tiers.BUDGET_MINUTES - sum(PARTS[name]["minutes"] for name in chosen)
    assert all(PARTS[name]["minutes"] > room for name in left_out)


def test_pip_s_progress_is_told_in_a_few_lines(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    progress = environment.Progress(".venv (test)")
    for line in (
        "Collecting torch==2.13.0\n",
        "  Downloading torch-2.13.0-cp311-linux.whl (146.2 MB)\n",
        "Collecting numpy>=1.26\n",
        "  Downloading numpy-2.4.0.whl (14.0 MB)\n",
        "Installing collected packages: numpy, torch\n",
    ):
        progress.read(line)
    progress.end(True)
    said = [line.partition(" [")[0] for line in out.getvalue().splitlines()]
    assert said == [
        ".venv (test): looking up packages",
        ".venv (test): package 1: getting torch-2.13.0-cp311-linux.whl (146.2 MB)",
        ".venv (test): unpacking 2 packages",
        ".venv (test): ready",
    ]


@pytest.mark.nightly
def test_an_environment_sees_the_torch_of_the_virtual_environment_that_makes_it(tmp_path):
    site = tmp_path / "theirs"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("")
    environment._make(tmp_path / "made", site)
    python = tmp_path / "made" / "bin" / "python"
    look = "import torch; print(torch.__file__)"
    found = subprocess.check_output([python, "-c", look], text=True)
    assert found.strip() == str(site / "torch" / "__init__.py")
