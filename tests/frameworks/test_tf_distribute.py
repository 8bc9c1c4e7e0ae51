"""Variables of tf.distribute, with a copy on each replica: those of two halves of a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import Trainer

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.timeout(300)

# Reading it sums or averages floats in another order.
_CLOSE = {"rel": 1e-6}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the trainings of one process came to; importing TensorFlow takes most of its time."""
    script = Path(__file__).parent / "tf_replicas.py"
    process = Trainer(tmp_path_factory.mktemp("replicas"), script=script)
    try:
        assert process.wait(280) == 0, process.output
    finally:
        process.end()
    (line,) = [line for line in process.lines if line.startswith("results ")]
    return dict(json.loads(line.removeprefix("results ")))


def test_each_replica_has_its_own_copy_back_to_the_bit(found):
    # Else the test would show nothing: Keras lets these differ by replica.
    assert any("moving_mean" in name for name in found["apart"])
    assert {"total", "mean"} <= set(found["apart"])
    assert set(found["copies"].values()) == {2}
    assert found["differing"] == []


@pytest.mark.parametrize("move", ["two four", "two one", "one two"])
def test_another_number_of_replicas_goes_on_with_the_same_sums(found, move):
    step, before, after = found["moves"][move]
    assert step == 3
    assert after == pytest.approx(before, **_CLOSE)


@pytest.mark.parametrize("kind", ["central", "device"])
def test_strategies_whose_variables_have_no_copies(found, kind):
    assert found[kind] == [6.0, 5.0]


def test_fit_goes_on_in_mid_epoch_with_the_same_bits_and_the_same_history(found):
    whole, stopped, gone_on = found["fit"]
    assert stopped == []
    assert len(whole[1]["mae"]) == 2
    assert gone_on == whole


def test_a_variable_of_another_shape_is_refused_before_anything_is_changed(found):
    assert "total (float32 [] → float32 [2])" in found["wrong shape"]


def test_variables_that_no_step_owns_are_refused_by_a_sentence():
    from holdfast.tensorflow import distribute

    on_a_server = SimpleNamespace(device="/job:ps/replica:0/task:0/device:CPU:0")
    assert "ParameterServerStrategy" in str(distribute.refuse(on_a_server))
    on_a_tpu = type("TPUMirroredVariable", (), {"device": "TPU:0"})
    on_a_tpu.__module__ = "tensorflow.python.distribute.tpu_values"
    assert "TPUStrategy" in str(distribute.refuse(on_a_tpu()))
