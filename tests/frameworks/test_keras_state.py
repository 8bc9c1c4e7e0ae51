"""What Keras objects are stored as, and what is refused in words; one process for all of it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import environment

SCRIPT = """
import sys
import keras
import numpy as np
import tensorflow as tf
import holdfast, holdfast.keras
from holdfast.keras.adapter import ADAPTER

def model(units=3, name=None):
    made = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(units, name=name),
                             keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    made.compile("adam", loss="mse", metrics=["mae"], run_eagerly=True)
    return made

def said(what, *wanted):
    try:
        what()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        assert all(word in text for word in wanted), text
        assert len(text.splitlines()) >= 2, text
    else:
        raise AssertionError(f"{wanted} was not refused")

x = np.ones((4, 2), "float32"); y = np.ones((4, 1), "float32")
first, second = model(), model()
state_of = ADAPTER.objects.object_state
names = list(state_of(first))
assert names == list(state_of(second)), names  # though Keras numbers its layers on
assert names[:2] == ["dense/kernel", "dense/bias"], names
assert list(state_of(model(name="mine")))[0] == "mine/kernel"

folder = sys.argv[1]
callback = holdfast.keras.Callback
with holdfast.Run(folder + "/a", model=first) as run:
    said(lambda: callback("a folder"), "this is not a run")
    said(lambda: first.evaluate(x, y, callbacks=[callback(run)], verbose=0), "model.evaluate()")
    said(lambda: first.predict(x, callbacks=[callback(run)], verbose=0), "model.predict()")
    said(lambda: second.fit(x, y, callbacks=[callback(run)], verbose=0), "not part of the run")
    two = [callback(run), callback(run)]
    said(lambda: first.fit(x, y, callbacks=two, verbose=0), "two holdfast.keras.Callback")
    backup = keras.callbacks.BackupAndRestore(folder + "/backup")
    said(lambda: first.fit(x, y, callbacks=[callback(run), backup], verbose=0), "BackupAndRestore")
    first.fit(x, y, epochs=1, verbose=0, callbacks=[callback(run)])
said(lambda: first.fit(x, y, callbacks=[callback(run)], verbose=0), "not open")
wider = holdfast.Run(folder + "/a", model=model(4))
said(wider.__enter__, "StateMismatch", "dense/kernel")

plain = keras.optimizers.Adam(0.1)  # not built, as in a loop of one's own
lone = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(5)])
weights, draw = lone.trainable_variables, keras.random.SeedGenerator
with holdfast.Run(folder + "/b", model=lone, optimizer=plain, seeds=draw(3)) as run:
    for _ in run.steps(2):
        plain.apply([keras.ops.ones_like(v) for v in weights], weights)
other = keras.optimizers.Adam(0.1)
with holdfast.Run(folder + "/b", model=lone, optimizer=other, seeds=draw(4)) as run:
    seeds = keras.ops.convert_to_numpy(run.state["seeds"].state.value)
    assert seeds.tolist() == [3, 0], seeds
    other.build(weights)  # what was stored waits for that
for one, two in zip(plain.variables, other.variables, strict=True):
    assert np.array_equal(*map(keras.ops.convert_to_numpy, (one, two))), one.path

class Written(keras.Model):  # by the user, without a build()
    def __init__(self):
        super().__init__()
        self.first, self.last = keras.layers.Dense(3), keras.layers.Dense(1)

    def call(self, x, training=False):
        return self.last(self.first(x))

def written():
    made = Written()
    made.compile("adam", loss="mse", run_eagerly=True)
    with holdfast.Run(folder + "/c", model=made) as run:
        made.fit(x, y, epochs=1, verbose=0, callbacks=[callback(run)])
    return [v.numpy().tolist() for v in [*made.variables, *made.optimizer.variables]]

assert written() == written()

class Net(tf.Module):  # plain variables of TensorFlow have one name, and may have one shape
    def __init__(self):
        self.a, self.b, self.c = (tf.Variable(tf.fill([2], float(n))) for n in (1, 2, 3))

def learn(folder, stop=None):
    net, adam = Net(), keras.optimizers.Adam(0.1)
    order = [net.c, net.a]  # not all, and not as they stand in the module

    @tf.function
    def step():
        adam.apply_gradients([(v * (n + 1), v) for n, v in enumerate(order)])

    with holdfast.Run(folder, adam=adam, net=net) as run:
        assert int(adam.iterations) == run.step - (run.step > 5), run.step
        for number in run.steps(9):
            if number == stop:
                run.stop("the test")
            if number != 5:  # is stopped there too, before the optimizer is built
                step()
    return [v.numpy().tolist() for v in [*net.variables, *adam.variables]]

for stop in (4, 5):
    try:
        learn(folder + "/parts", stop)
    except SystemExit:
        pass
assert learn(folder + "/parts") == learn(folder + "/whole")
print("all is well")
"""


def test_names_and_refusals(tmp_path: Path) -> None:
    if find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed")
    more = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**environment(), **os.environ, **more},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "all is well" in done.stdout, done.stdout + done.stderr
