"""Keras: model.fit with a callback, shuffled arrays, Adam, dropout, a metric and a validation."""

from __future__ import annotations

import keras
import task

import holdfast
import holdfast.keras

keras.utils.set_random_seed(3)
model = keras.Sequential(
    [
        keras.layers.Input((6,)),
        keras.layers.Dense(task.HIDDEN, activation="tanh"),
        keras.layers.Dropout(task.DROPPED),
        keras.layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(task.RATE), "mse", metrics=["mae"])
with holdfast.Run(task.FOLDER, settings=task.SETTINGS, model=model) as run:
    model.fit(
        task.INPUTS,
        task.TARGETS,
        batch_size=task.BATCH,
        epochs=task.EPOCHS,
        validation_data=(task.INPUTS, task.TARGETS),
        callbacks=[holdfast.keras.Callback(run)],
        verbose=0,
    )
