"""Rules of the run end the training; their patience is not begun anew by an interruption."""

import hashlib
import time

import keras
import numpy as np

import holdfast
from holdfast.rules import Plateau, Threshold

EPOCHS = 20
PATIENCE = 3
THRESHOLD = 5.0

keras.utils.set_random_seed(9)
inputs = np.random.normal(size=(96, 8)).astype("float32")
targets = np.tanh(inputs[:, :1] - inputs[:, 1:2]) + 0.3 * np.random.normal(size=(96, 1))
train_x, train_y, val_x, val_y = inputs[:64], targets[:64], inputs[64:], targets[64:]
model = keras.Sequential(
    [
        keras.layers.Input((8,)),
        keras.layers.Dense(32, activation="tanh"),
        keras.layers.GaussianNoise(0.1),
        keras.layers.Dense(1),
    ]
)
model.compile(optimizer=keras.optimizers.AdamW(2e-2), loss="mse")

rules = Plateau("validation_loss", patience=PATIENCE) | Threshold(
    "validation_loss", above=THRESHOLD
)
with holdfast.Run("run", model=model, stop_when=rules) as run:
    for _ in run.epochs(EPOCHS):
        for first in run.batches(range(0, 64, 16)):
            model.train_on_batch(train_x[first : first + 16], train_y[first : first + 16])
            time.sleep(0.005)  # stands for a larger model
        with run.phase("validation"):
            loss = float(model.evaluate(val_x, val_y, batch_size=32, verbose=0))
            run.log(validation_loss=loss)

weights = np.concatenate([weight.numpy().ravel() for weight in model.weights])
print("weights", hashlib.sha256(weights.tobytes()).hexdigest())
