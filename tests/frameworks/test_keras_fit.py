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


_ADVICE = "Give it the callback"
_ANOTHER_LIFE = """
import sys, keras, holdfast, numpy as np
batch, initial, stop_at = map(int, sys.argv[3:])
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
data = {"x": x, "y": x, "batch_size": batch}
if sys.argv[2] == "tf.data":
    import tensorflow as tf
    data = {"x": tf.data.Dataset.from_tensor_slices((x, x)).shuffle(60, seed=1).batch(batch)}
with holdfast.Run(sys.argv[1], model=model) as run:
    ours = [] if sys.argv[2] == "no callback" else [holdfast.keras.Callback(run)]
    model.fit(**data, epochs=4, initial_epoch=initial, verbose=0, callbacks=[Count(), *ours])
"""


def another_life(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _ANOTHER_LIFE, *map(str, words)],
        env=environment(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3"),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("data", "second", "epochs", "said"),
    [
        ("arrays", (5, 0), {1: 8, 2: 12, 3: 12}, "the loader had 6 batches and has 12 now"),
        ("arrays", (20, 0), {1: 0, 2: 3, 3: 3}, "the loader had 6 batches and has 3 now"),
        ("tf.data", (20, 0), {1: 0, 2: 3, 3: 3}, "the loader had 6 batches and has 3 now"),
        # Its iterator knows the samples that are left of epoch 1, and those that are prefetched.
        pytest.param(
            *("tf.data", (5, 0), {2: 12, 3: 12}, "the loader had 6 batches and has 12 now"),
            marks=pytest.mark.nightly,
        ),
        ("arrays", (10, 1), {1: 2, 2: 6, 3: 6}, "initial_epoch=1: this fit began with 0"),
    ],
    ids=["smaller batches", "larger batches", "larger of tf.data", "smaller of tf.data", "epoch"],
)
def test_a_later_fit_that_is_called_otherwise_drops_no_batch_and_no_epoch(
    data, second, epochs, said, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    # Stopped after ten batches, of which each epoch has six.
    assert another_life(folder, data, 10, 0, 10).returncode == 130
    found = another_life(folder, data, *second, 0)
    assert found.returncode == 0, found.stderr
    told = re.findall(r"epoch (\d+) batches (\d+)", found.stdout)
    made = {int(epoch): int(count) for epoch, count in told}
    assert list(made) == [1, 2, 3]
    assert {epoch: made[epoch] for epoch in epochs} == epochs
    assert said in found.stderr
    assert _ADVICE not in found.stderr


@pytest.mark.timeout(200)
def test_a_fit_without_the_callback_is_told_of_it(tmp_path: Path) -> None:
    """tests/frameworks/test_run_life.py has a stand-in for Keras."""
    found = another_life(tmp_path / "run", "no callback", 10, 0, 0)
    assert found.returncode == 0, found.stderr
    assert f"{_ADVICE}: model.fit(…, callbacks=[holdfast.keras.Callback(run)])" in found.stderr
