"""A training by tf.distribute: on two replicas of one process, or as one of two workers.

Prints `ready STEP`, `step N` when a step is made, `left STEP` when it leaves by an exception, and
`hash HEX` of all that is trained, copy by copy.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import holdfast

_BATCHES = 12  # of an epoch


def _make_strategy(kind: str) -> tf.distribute.Strategy:
    if kind == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    (cpu,) = tf.config.list_physical_devices("CPU")
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, halves)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


class Training:
    """What is trained, and how."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan = plan
        self._strategy = strategy = _make_strategy(plan["meets"])
        keras.utils.set_random_seed(1)
        inputs = np.random.default_rng(0).random((8 * _BATCHES, 4)).astype(np.float32)
        pairs = tf.data.Dataset.from_tensor_slices((inputs, inputs.sum(1, keepdims=True)))
        sharding = tf.data.Options()
        by_data = tf.data.experimental.AutoShardPolicy.DATA
        sharding.experimental_distribute.auto_shard_policy = by_data
        pairs = pairs.shuffle(len(inputs), seed=5).batch(8).with_options(sharding)
        self._loader = strategy.experimental_distribute_dataset(pairs)
        with strategy.scope():
            layers = [keras.layers.Dense(3), keras.layers.BatchNormalization()]
            layers += [keras.layers.Dropout(0.5), keras.layers.Dense(1)]
            self._model = keras.Sequential([keras.Input((4,)), *layers])
            self._optimizer = keras.optimizers.Adam(1e-2)
            self._optimizer.build(self._model.trainable_variables)
            self._metric = keras.metrics.Mean()
        self._step = tf.function(self._train)

    def _train(self, inputs: Any, targets: Any) -> tf.Tensor:
        losses = self._strategy.run(self._train_replica, args=(inputs, targets))
        return self._strategy.reduce("sum", losses, axis=None)

    def _train_replica(self, inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        weights = self._model.trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self._model(inputs, training=True) - targets) ** 2) / 8
        self._optimizer.apply(tape.gradient(loss, weights), weights)
        self._metric.update_state(loss)
        return loss

    def train(self) -> None:
        plan = self._plan
        state = {"model": self._model, "optimizer": self._optimizer, "metric": self._metric}
        settings = holdfast.Settings(**plan["settings"])
        run = holdfast.Run(plan["folder"], settings=settings, **state)
        try:
            with run:
                print("ready", run.step, flush=True)
                for _ in run.epochs(plan["total"]):
                    for inputs, targets in run.batches(self._loader):
                        run.log(loss=self._step(inputs, targets))
                        time.sleep(plan["pauses"][plan["rank"]])  # a rank that is slower
                        print("step", run.step + 1, flush=True)
        except BaseException:  # told to the test, and raised again
            print("left", run.step, flush=True)
            raise
        print("hash", self._hash(), flush=True)

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for part in (self._model, self._optimizer, self._metric):
            for variable in part.variables:
                for copy in variable.value.values:
                    digest.update(copy.numpy().tobytes())
        return digest.hexdigest()


if __name__ == "__main__":
    Training(json.loads(sys.argv[1])).train()
