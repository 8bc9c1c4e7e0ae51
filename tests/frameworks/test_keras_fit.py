"""model.fit goes on to the same bits, whatever it was given and wherever it was stopped."""

from __future__ import annotations

import os
import re
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


_ANOTHER_LIFE = """
import sys, keras, holdfast, numpy as np
batch, initial, stop_at = map(int, sys.argv[2:])
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
made = [0, 0]  # in this epoch, in this life

class Count(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        made[0] = 0
    def on_train_batch_end(self, number, logs=None):
        made[:] = made[0] + 1, made[1] + 1
        if made[1] == stop_at:
            run.stop("enough")
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, "batches", made[0], flush=True)

x = np.arange(60, dtype="float32").reshape(60, 1) / 60
with holdfast.Run(sys.argv[1], model=model) as run:
    model.fit(x, x, batch_size=batch, epochs=4, initial_epoch=initial, verbose=0,
              callbacks=[Count(), holdfast.keras.Callback(run)])
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("second", "epochs", "said"),
    [
        ((5, 0), {1: 8, 2: 12, 3: 12}, "the loader had 6 batches and has 12 now"),
        ((10, 1), {1: 2, 2: 6, 3: 6}, "initial_epoch=1: this fit began with 0"),
    ],
    ids=["another batch size", "another initial epoch"],
)
def test_a_later_fit_that_is_called_otherwise_drops_no_batch_and_no_epoch(
    second, epochs, said, tmp_path: Path
) -> None:
    def live(*words: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", _ANOTHER_LIFE, tmp_path / "run", *map(str, words)],
            env=environment(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3"),
            capture_output=True,
            text=True,
            check=False,
        )

    assert live(10, 0, 10).returncode == 130  # after ten of the six batches of an epoch
    found = live(*second, 0)
    assert found.returncode == 0, found.stderr
    told = re.findall(r"epoch (\d+) batches (\d+)", found.stdout)
    assert {int(epoch): int(count) for epoch, count in told} == epochs
    assert said in found.stderr
