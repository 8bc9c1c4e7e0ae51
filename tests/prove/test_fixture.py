"""The fixture as a plugin: there without asking, and of no cost to those who do not ask."""

from __future__ import annotations

import subprocess
import sys

import pytest

import holdfast
from tests.cli.command import environment

SCRIPT = """
import numpy as np, holdfast
weights = np.zeros(4)
with holdfast.Run("runs/tiny", weights=weights) as run:
    for step in run.steps(60):
        weights += np.random.default_rng(step).random(4)
        run.log(loss=float(weights.sum()))
"""
TESTS = """
def test_survives(holdfast_prove):
    proof = holdfast_prove("python", "train.py", kills=2, signals="INT,KILL", seed=1)
    assert proof.verdict == "equal"
"""
QUIET = """
import sys
def test_nothing_was_loaded():
    heavy = {"click", "rich", "numpy", "torch", "psutil"} | {"holdfast._tools.prove.prove"}
    assert "holdfast._tools.prove.fixture" in sys.modules
    assert heavy.isdisjoint(sys.modules), heavy & set(sys.modules)
    assert not [name for name in sys.modules if name.startswith("holdfast._r")]
"""


def pytest_in(folder):
    # Without the plugins of our own suite, which load much of this.
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    for plugin in ("hypothesispytest", "xdist", "anyio", "jaxtyping"):
        command += ["-p", f"no:{plugin}"]
    command.append(".")
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=100, env=environment()
    )


def test_a_suite_that_does_not_use_it_is_not_slowed_down(tmp_path):
    (tmp_path / "test_quiet.py").write_text(QUIET)
    done = pytest_in(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pytest_does_not_warn_where_holdfast_was_imported_before_it():
    # Only for a package that is not installed as editable, so there is no seeing it here.
    assert "PYTEST_DONT_REWRITE" in holdfast.__doc__


@pytest.mark.nightly  # test_command.py calls the fixture
def test_a_script_is_proved_in_a_suite_with_nothing_but_the_fixture(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "test_it.py").write_text(TESTS)
    done = pytest_in(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_script_that_loses_something_fails_its_test_with_the_report(tmp_path):
    forgets = SCRIPT.replace("with holdfast", "momentum = np.zeros(4)\nwith holdfast")
    forgets = forgets.replace("weights +=", "momentum += 0.1\n        weights += momentum +")
    (tmp_path / "train.py").write_text(forgets)
    (tmp_path / "test_it.py").write_text(TESTS)
    done = pytest_in(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "holdfast.ProofError: NOT equal: after interruption" in done.stdout
    assert "to replay" in done.stdout
