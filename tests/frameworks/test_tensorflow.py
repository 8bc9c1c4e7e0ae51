"""TensorFlow: what is state, and where its data stands, goes on to the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import environment

pytest.importorskip("tensorflow", reason="pip install 'holdfast[tensorflow]'")
# One process for all trainings, and one for all corners: the first test of each waits for it.
pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).parents[2]
Results = dict[str, dict[str, Any]]


def _results(module: str, place: Path) -> Results:
    """What a module of trainings has to say of each of them."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.frameworks.{module}", str(place)],
        cwd=ROOT,
        env=environment(TF_CPP_MIN_LOG_LEVEL="3", OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {result["name"]: result for result in results}


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _results("tensorflow_lives", tmp_path_factory.mktemp("lives"))


@pytest.fixture(scope="module")
def corners(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return _results("tensorflow_corners", tmp_path_factory.mktemp("corners"))


@pytest.mark.parametrize(
    "name",
    [
        "shuffled",
        "prefetched pairs",
        "cached",
        "interleaved",
        "of unknown length",
        "shuffled twice",
        "repeated in an epoch",
        "one behind another",
        "with buffers too large to keep",
        "with a random op in map",
        "of a generator",
        "of a generator that draws",
        "derived anew in each epoch",
        "made anew in each epoch",
        "distributed",
    ],
)
def test_a_dataset_goes_on_at_the_very_batch(lives: Results, name: str) -> None:
    """In the middle of an epoch, at its last batch, between two, and in the pass after that."""
    _see_same(lives, name)


def test_every_kind_of_state_goes_on_exactly(lives: Results) -> None:
    """Modules, variables, generators, iterators, tables, checkpoints, tensors, the global seed."""
    _see_same(lives, "objects")


def test_an_iterator_in_batches_goes_on_where_it_was(lives: Results) -> None:
    _see_same(lives, "an iterator")


def test_datasets_side_by_side_with_draws_around_them(lives: Results) -> None:
    _see_same(lives, "side by side")


def test_small_states_are_kept_and_large_ones_are_made_again(lives: Results) -> None:
    assert "replayed" not in lives["shuffled"]["said"]
    assert "replayed" in lives["with buffers too large to keep"]["said"]


def test_all_lives_were_stopped(lives: Results) -> None:
    """Else there would be nothing that goes on."""
    assert all(len(each["lives"]) >= 3 for each in lives.values())
    assert lives["shuffled"]["lives"] == [2, 4, 6, 6]


def _see_same(lives: Results, name: str) -> None:
    result = lives[name]
    assert "error" not in result, result["error"]
    assert result["parts"] == result["whole"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("other_shape", "changed: net.weight (float32 [3] → float32 [4])\n"),
        ("other_shape", "changed: bare (float32 [1]"),
        ("other_shape", "not in the checkpoint: net.layers.1"),
        ("other_shape", "kept [5.]"),
        ("other_generator", "its algorithm is 2, and was 1"),
        ("session", "a Session of TensorFlow 1"),
        ("graph_variable", "weight: it belongs to a graph"),
        ("graph_variable", "all.0: it belongs to a graph"),
        ("old_optimizer", "an optimizer of TensorFlow 1"),
        ("strings", "words: a tensor of type string cannot be stored"),
        ("quantized", "q: a tensor of type qint8 cannot be stored"),
        ("iterator_twice", "restored twice"),
        ("in_a_graph", "count: it belongs to a graph"),
        ("other_dataset", "8 batches"),
        ("keras_in_module", "same"),
        ("nan_in_all_states", "left []"),
    ],
)
def test_what_does_not_fit_is_refused(corners: Results, name: str, expected: str) -> None:
    assert expected in corners[name]["refused"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("draws_in_function", "a tf.function draws random numbers by RandomStandardNormal"),
        ("draws_in_function", "(make_noise)"),
        ("draws_in_parallel", "draws random numbers by RandomUniformInt in parallel calls"),
        ("not_ordered", "order is not deterministic"),
        ("generator_runs_ahead", "draws from a tf.random.Generator ahead"),
        ("layer_runs_ahead", "changes variables, as random layers of Keras do"),
        ("other_dataset", "is made in another way"),
    ],
)
def test_what_cannot_be_exact_is_said(corners: Results, name: str, expected: str) -> None:
    assert expected in corners[name]["said"], corners[name]


@pytest.mark.parametrize("name", ["exact_draws_in_function", "keras_in_module"])
def test_nothing_is_said_where_all_is_exact(corners: Results, name: str) -> None:
    assert "tf.function" not in corners[name]["said"]
