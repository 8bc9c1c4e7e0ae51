"""model.fit goes on to the same bits, whatever it was given and wherever it was stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import environment

ROOT = Path(__file__).parents[2]
CASES = [
    pytest.param("tensorflow", ["arrays", "dataset", "py-dataset", "callbacks", "two-in-one"]),
    pytest.param(
        "tensorflow",
        ["repeated", "of-unknown-length", "generator", "twice", "unbuilt", "scaled"],
        marks=pytest.mark.nightly,
    ),
    pytest.param("jax", ["arrays"], marks=pytest.mark.nightly),
    pytest.param("torch", ["loader"], marks=pytest.mark.nightly),
]


def lives(backend: str, folder: Path, *cases: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.frameworks.keras_lives", str(folder), *cases],
        cwd=ROOT,
        env={**environment(), **os.environ, "KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"}
        | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("backend", "cases"), CASES)
def test_fit_goes_on_to_the_same_bits(backend: str, cases: list[str], tmp_path: Path) -> None:
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    said = lives(backend, tmp_path, *cases)
    for case in [*cases, "again"]:
        assert f"{case}: nothing\n" in said, said
