"""Trainings on the replicas of tf.distribute, in one process: says as JSON what came of each.

Interrupted by ending the loop early: what counts here is which values are stored, and how they
come back to the same replicas or to others.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import holdfast
import holdfast.keras

_STEPS = 6
_SUM, _MEAN = tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN
_ON_READ = tf.VariableSynchronization.ON_READ


class Job:
    """What is trained, made anew as another life would make it."""

    def __init__(self, strategy: tf.distribute.Strategy, seed: int = 1) -> None:
        keras.backend.clear_session()
        keras.utils.set_random_seed(seed)
        self._strategy = strategy
        with strategy.scope():
            layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
            layers += [keras.layers.Dropout(0.5), keras.layers.Dense(1)]
            self.model = keras.Sequential([keras.Input((4,)), *layers])
            self.optimizer = keras.optimizers.Adam(1e-2)
            self.optimizer.build(self.model.trainable_variables)
            self.metric = keras.metrics.Mean()
            self.total = tf.Variable(0.0, synchronization=_ON_READ, aggregation=_SUM)
            self.module = tf.Module()
            self.module.mean = tf.Variable(0.0, synchronization=_ON_READ, aggregation=_MEAN)
            self.module.plain = tf.Variable([float(seed), 2.0])
            self.generator = tf.random.Generator.from_seed(seed)
        inputs = np.random.default_rng(0).random((8 * _STEPS, 4)).astype(np.float32)
        pairs = tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(1, keepdims=True)))
        self._batches = list(strategy.experimental_distribute_dataset(pairs.batch(8)))
        self._step = tf.function(self._train)

    def _train(self, inputs: Any, targets: Any) -> None:
        self._strategy.run(self._train_replica, args=(inputs, targets))

    def _train_replica(self, inputs: tf.Tensor, targets: tf.Tensor) -> None:
        weights = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self.model(inputs, training=True) - targets) ** 2) / 8
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.metric.update_state(loss)
        self.total.assign_add(loss)
        self.module.mean.assign_add(tf.reduce_sum(self.generator.normal([2])))

    @property
    def state(self) -> dict[str, Any]:
        names = ("model", "optimizer", "metric", "total", "module", "generator")
        return {name: getattr(self, name) for name in names}

    def train(self, folder: Path, steps: int) -> Job:
        with holdfast.Run(folder, **self.state) as run:
            for step in run.steps(steps):
                self._step(*self._batches[step])
        return self

    def variables(self) -> dict[str, Any]:
        parts = (self.model, self.optimizer, self.metric)
        found = {v.path: v.value for part in parts for v in part.variables}
        own = {"total": self.total, "mean": self.module.mean, "plain": self.module.plain}
        return {**found, **own, "generator": self.generator.state}

    def bits(self) -> dict[str, list[bytes]]:
        """The values of every copy."""
        return {
            name: [copy.numpy().tobytes() for copy in getattr(variable, "values", (variable,))]
            for name, variable in self.variables().items()
        }

    def read(self) -> dict[str, float]:
        """What a user sees, over all replicas."""
        return {
            "metric": float(self.metric.result()),
            "total": float(self.total.read_value()),
            "mean": float(self.module.mean.read_value()),
            "weights": float(tf.reduce_sum(self.model.weights[0])),
        }


class _StopAt(keras.callbacks.Callback):
    def __init__(self, run: holdfast.Run, step: int) -> None:
        super().__init__()
        self._run, self._step = run, step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._run.step == self._step:
            self._run.stop("enough")


def fit(folder: Path, strategy: tf.distribute.Strategy, stop_at: int = -1) -> list[Any]:
    """Keras's own loop in the scope of a strategy: the values of every copy, and the history."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile("adam", "mse", metrics=["mae"])
    inputs = np.random.default_rng(0).random((24, 4)).astype(np.float32)
    with contextlib.suppress(holdfast.Stopped), holdfast.Run(folder, model=model) as run:
        callbacks = [holdfast.keras.Callback(run), _StopAt(run, stop_at)]
        targets = inputs.sum(1, keepdims=True)
        history = model.fit(inputs, targets, batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
        copies = [copy for v in model.variables for copy in v.value.values]
        return [[copy.numpy().tobytes().hex() for copy in copies], history.history]
    return []


def main(place: Path) -> dict[str, Any]:
    (cpu,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(cpu, devices)
    strategies: dict[str, Callable[[], Any]] = {
        "one": tf.distribute.get_strategy,
        "two": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
        "four": lambda: tf.distribute.MirroredStrategy([f"CPU:{n}" for n in range(4)]),
        "central": lambda: tf.distribute.experimental.CentralStorageStrategy(
            ["CPU:0", "CPU:1"], "CPU:0"
        ),
        "device": lambda: tf.distribute.OneDeviceStrategy("CPU:1"),
    }

    def job(kind: str, seed: int = 1) -> Job:
        return Job(strategies[kind](), seed)

    reference = job("two").train(place / "reference", _STEPS).bits()
    before = {"two": job("two").train(place / "two", 3).read()}
    shutil.copytree(place / "two", place / "two once more")
    shutil.copytree(place / "two", place / "two on one")
    again = job("two", seed=7).train(place / "two", _STEPS).bits()
    before["one"] = job("one").train(place / "one", 3).read()
    found: dict[str, Any] = {
        "apart": sorted(name for name, copies in reference.items() if len(set(copies)) > 1),
        "differing": sorted(name for name in reference if reference[name] != again[name]),
        "copies": {name: len(copies) for name, copies in again.items()},
        "moves": {},
    }
    places = {"two four": "two once more", "two one": "two on one", "one two": "one"}
    for move, folder in places.items():
        then, now = move.split()
        moved = job(now, seed=9)
        with holdfast.Run(place / folder, **moved.state) as run:
            found["moves"][move] = [run.step, before[then], moved.read()]
    for kind in ("central", "device"):
        with strategies[kind]().scope():
            made = [tf.Variable([float(number), 2.0]) for number in range(2)]
        for number, variable in enumerate(made):
            with holdfast.Run(place / kind, variable=variable) as run:
                for _ in run.steps(3 * (number + 1)):
                    variable.assign_add([1.0, 0.5])
        found[kind] = made[1].numpy().tolist()
    whole = fit(place / "fit", strategies["two"]())
    stopped = fit(place / "fit again", strategies["two"](), stop_at=3)
    found["fit"] = [whole, stopped, fit(place / "fit again", strategies["two"]())]
    with strategies["two"]().scope():
        wide = tf.Variable([0.0, 0.0], synchronization=_ON_READ, aggregation=_SUM)
    try:
        with holdfast.Run(place / "two", **{**job("two").state, "total": wide}):
            pass
    except holdfast.StateMismatch as error:
        found["wrong shape"] = str(error)
    return found


if __name__ == "__main__":
    results = main(Path(sys.argv[1]))
    print("results", json.dumps(results), flush=True)
