"""A loop in a run, which is eager; its first word is what the run is not told of."""

import sys

import keras
import numpy as np
import tensorflow as tf

import holdfast

keras.utils.set_random_seed(3)
inputs = np.random.normal(size=(40, 6)).astype("float32")
targets = inputs.sum(1, keepdims=True)
model = keras.Sequential(
    [keras.layers.Input((6,)), keras.layers.Dense(8), keras.layers.BatchNormalization()]
)
optimizer = keras.optimizers.SGD(1e-2, momentum=0.9)
state = {"model": model, "optimizer": optimizer}
state.pop(sys.argv[1], None)
with holdfast.Run("runs/here", **state) as run:
    for step in run.steps(20):
        with tf.GradientTape() as tape:
            chosen = np.arange(8 * step, 8 * step + 8) % 40
            loss = tf.reduce_mean((model(inputs[chosen], training=True) - targets[chosen]) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        run.log(loss=loss)
