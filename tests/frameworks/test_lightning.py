"""trainer.fit goes on to the same bits, wherever it was stopped; and who yields to whom."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import Trainer, environment, journal_events, wait_until

# Not by importing it here, which takes seconds: processes of their own do.
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="pip install lightning")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "lightning_fit.py"
CASES = [
    pytest.param("lightning.pytorch", ["accumulate"]),
    pytest.param(
        "lightning.pytorch",
        [
            *("manual", "steps", "unknown", "combined", "swa", "module", "checkpoints", "early"),
            *("plain", "workers", "ema", "killed"),
        ],
        marks=pytest.mark.nightly,
    ),
    pytest.param("pytorch_lightning", ["killed"]),
    pytest.param("pytorch_lightning", ["plain", "scaled", "plateau"], marks=pytest.mark.nightly),
]


def corner_names() -> list[str]:
    """By the text: whoever imports it imports Lightning, and that takes seconds."""
    text = (Path(__file__).parent / "lightning_corners.py").read_text()
    listed = next(
        node.value
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CORNERS"
    )
    assert isinstance(listed, ast.Tuple)
    return [ast.unparse(each) for each in listed.elts]


def python(module: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.frameworks.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={**environment(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("package", "cases"), CASES)
def test_fit_goes_on_to_the_same_bits(package: str, cases: list[str], tmp_path: Path) -> None:
    whole = package.partition(".")[0]
    if find_spec(whole) is None:
        pytest.skip(f"pip install {whole}")
    said = python("lightning_lives", package, tmp_path, *cases)
    for case in [*cases, "again"]:
        assert f"{case}: nothing\n" in said, said


@pytest.fixture(scope="module")
def corners(tmp_path_factory: pytest.TempPathFactory) -> str:
    return python("lightning_corners", tmp_path_factory.mktemp("corners"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("corner", corner_names())
def test_of_the_callback(corner: str, corners: str) -> None:
    found = re.search(rf"^{corner}: (.*)$", corners, re.MULTILINE)
    assert found is not None, corners
    assert found[1] == "as it should be", corners


def ranks(folder: Path) -> Trainer:
    arguments = ["--folder", folder, "--devices", 2, "--epochs", 2, "--size", 2560]
    return Trainer(*arguments, script=EXAMPLE, env={**environment(), "OMP_NUM_THREADS": "1"})


def weights(trainer: Trainer) -> str:
    assert trainer.wait(240) == 0, trainer.output
    return re.findall(r"weights ([0-9a-f]{16})", trainer.output)[-1]


def step_of(folder: Path) -> int:
    return max([e["step"] for e in journal_events(folder, "stop")], default=0)


@pytest.mark.timeout(900)
def test_two_ranks_of_lightning_stop_together_and_go_on_to_the_same_bits(tmp_path: Path) -> None:
    whole = ranks(tmp_path / "whole")
    undisturbed = weights(whole)
    folder = tmp_path / "parts"
    first = ranks(folder)
    try:
        wait_until(lambda: journal_events(folder, "loop"), 200, "the loop")
        first.send(signal.SIGTERM)  # to rank 0 alone, which has started the other
        assert first.wait(120) == 143, first.output
        stopped_at = step_of(folder)
        assert "Child process with PID" not in first.output
        second = ranks(folder)
        assert weights(second) == undisturbed, second.output
        assert f"resumed at step {stopped_at} " in second.output
    finally:
        first.end()
        whole.end()
