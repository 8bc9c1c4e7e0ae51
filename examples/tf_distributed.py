"""TensorFlow on several devices or several processes, which stop, save and go on as one run.

    python examples/tf_distributed.py

trains on the GPUs of this machine (MirroredStrategy), or on two halves of its CPU. Two processes
that TF_CONFIG makes workers of one cluster train together (MultiWorkerMirroredStrategy):

    for i in 0 1; do
        TF_CONFIG='{"cluster": {"worker": ["127.0.0.1:29870", "127.0.0.1:29871"]},
                    "task": {"type": "worker", "index": '$i'}}' python examples/tf_distributed.py &
    done; wait

Press Ctrl-C, or kill one worker with -9 from another terminal, and start the same again: all go on
behind the same step. The last line has a hash of the weights, the same however you interrupt it.
"""

import argparse
import hashlib
import os

import keras
import numpy as np
import tensorflow as tf

import holdfast


def make_strategy() -> tf.distribute.Strategy:
    """As the environment says; it must come before anything else of TensorFlow."""
    if "TF_CONFIG" in os.environ:
        return tf.distribute.MultiWorkerMirroredStrategy()
    if tf.config.list_physical_devices("GPU"):
        return tf.distribute.MirroredStrategy()
    (cpu,) = tf.config.list_physical_devices("CPU")
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, halves)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def make_data(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Points of three spirals that wind around each other, with some noise."""
    rng = np.random.default_rng(0)
    arm, way = rng.integers(3, size=size), rng.random(size)
    angle = 5 * way + arm * (2 * np.pi / 3) + rng.normal(scale=0.15, size=size)
    points = np.stack([way * np.cos(angle), way * np.sin(angle)], axis=1)
    return points.astype(np.float32), arm.astype(np.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/tf_distributed", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--size", type=int, default=6400, help="points in an epoch")
    options = parser.parse_args()

    strategy = make_strategy()
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    data = tf.data.Dataset.from_tensor_slices(make_data(options.size))
    data = data.shuffle(options.size, seed=0).batch(64, drop_remainder=True)
    sharding = tf.data.Options()
    sharding.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    loader = strategy.experimental_distribute_dataset(data.with_options(sharding))

    with strategy.scope():
        dense, norm = keras.layers.Dense, keras.layers.BatchNormalization
        layers = [dense(96, "relu"), norm(), keras.layers.Dropout(0.1), dense(96, "relu"), dense(3)]
        model = keras.Sequential([keras.Input((2,)), *layers])
        optimizer = keras.optimizers.AdamW(3e-3)
        weights = model.trainable_variables
        optimizer.build(weights)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")

    def train_replica(points: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(points, training=True)) / 64  # over all replicas
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    @tf.function
    def train_step(points: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        losses = strategy.run(train_replica, args=(points, labels))
        return strategy.reduce("sum", losses, axis=None)

    with holdfast.Run(options.folder, model=model, optimizer=optimizer) as run:  # on every worker
        for _ in run.epochs(options.epochs):
            for points, labels in run.batches(loader):
                run.log(loss=train_step(points, labels))

    points, labels = make_data(3000)
    right = np.argmax(model(points), axis=1) == labels
    bits = b"".join(weight.numpy().tobytes() for weight in weights)
    digest = hashlib.sha256(bits).hexdigest()[:16]
    replicas = strategy.num_replicas_in_sync
    print(f"accuracy {right.mean():.1%} on {replicas} replica(s), weights {digest}")


if __name__ == "__main__":
    main()
