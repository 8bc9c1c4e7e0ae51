"""A strategy trains on two devices, and is one run: what it holds on both is stored once."""

import hashlib
import time

import keras
import numpy as np
import tensorflow as tf

import holdfast

STEPS = 48

devices = [tf.config.LogicalDeviceConfiguration()] * 2  # as if there were two GPUs
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
keras.utils.set_random_seed(8)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
inputs = np.random.normal(size=(128, 10)).astype("float32")
targets = (inputs[:, :1] * inputs[:, 1:2]).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((inputs, targets)).shuffle(128, seed=8).batch(16)
batches = strategy.experimental_distribute_dataset(dataset)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((10,)),
            keras.layers.Dense(32, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
    )
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, STEPS), 0.9)
    optimizer.build(model.trainable_variables)


def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / 16
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


@tf.function
def distributed_step(x, y):
    losses = strategy.run(train_step, args=(x, y))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


with holdfast.Run("run", model=model, optimizer=optimizer) as run:
    for _ in run.epochs(STEPS * 16 // 128):
        for x, y in run.batches(batches):
            loss = distributed_step(x, y)
            run.log(loss=loss)
            time.sleep(0.005)  # stands for a larger model

weights = np.concatenate([weight.numpy().ravel() for weight in model.weights])
print("weights", hashlib.sha256(weights.tobytes()).hexdigest())
