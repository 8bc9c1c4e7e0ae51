"""A loop with a tf.function and a manager of checkpoints; its first word leaves something out."""

import sys

import keras
import numpy as np
import tensorflow as tf

STEPS, SAVE_EVERY = 24, 3

keras.utils.set_random_seed(1)
inputs = np.random.normal(size=(40, 6)).astype("float32")
targets = inputs.sum(1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((inputs, targets)).shuffle(40, seed=1).batch(8)
batches = iter(dataset.repeat())
layers = [keras.layers.Input((6,)), keras.layers.Dense(8, activation="tanh")]
if sys.argv[1] == "dropout":
    layers.append(keras.layers.Dropout(0.3))
model = keras.Sequential([*layers, keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(1e-2)
step = tf.Variable(0)


@tf.function
def train(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


parts = {"model": model, "optimizer": optimizer, "step": step, "batches": batches}
parts.pop(sys.argv[1], None)
checkpoint = tf.train.Checkpoint(**parts)
manager = tf.train.CheckpointManager(checkpoint, "saved", max_to_keep=2)
checkpoint.restore(manager.latest_checkpoint)
while int(step) < STEPS:
    train(*next(batches))
    step.assign_add(1)
    if int(step) % SAVE_EVERY == 0:
        manager.save()
