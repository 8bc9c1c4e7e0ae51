"""Keras's own loop, with its own callback for interruptions: that one knows epochs only."""

import keras
import numpy as np

keras.utils.set_random_seed(2)
inputs = np.random.normal(size=(40, 6)).astype("float32")
model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1)])
model.compile(optimizer=keras.optimizers.SGD(1e-2, momentum=0.9), loss="mse")
model.fit(
    inputs,
    inputs.sum(1, keepdims=True),
    batch_size=8,
    epochs=5,
    verbose=0,
    callbacks=[keras.callbacks.BackupAndRestore("backup")],
)
