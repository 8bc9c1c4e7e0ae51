"""A Keras model and its optimizer in a loop of one's own; killed in the middle if asked to be.

python train_keras.py FOLDER TOTAL [STEP AT WHICH IT KILLS ITSELF]
"""

from __future__ import annotations

import os
import signal
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras
import numpy as np
import tensorflow as tf

import holdfast

keras.utils.set_random_seed(3)
model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(1e-2)
x = np.random.RandomState(0).rand(32, 4).astype(np.float32)
last = int(sys.argv[3]) if len(sys.argv) > 3 else -1

settings = holdfast.Settings(checkpoint_every=2)
with holdfast.Run(sys.argv[1], settings=settings, model=model, optimizer=optimizer) as run:
    for step in run.steps(int(sys.argv[2])):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - x.sum(1, keepdims=True)) ** 2)
        weights = model.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
