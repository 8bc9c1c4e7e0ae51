"""A condition ends the training where the validation comes to rest; a flag ends it by a signal."""

import hashlib
import signal
import time

import keras
import numpy as np
import tensorflow as tf

EPOCHS = 20
PATIENCE = 3
THRESHOLD = 5.0

stop_training = False
custom_termination = False
best, waited = float("inf"), 0


def note_signal(number, _frame) -> None:
    global stop_training
    print(f"{signal.Signals(number).name}: stopping the training")
    stop_training = True


def check_termination(validation_loss) -> None:
    global custom_termination, best, waited
    best, waited = min(best, validation_loss), 0 if validation_loss < best else waited + 1
    if validation_loss > THRESHOLD or waited >= PATIENCE:
        custom_termination = True


signal.signal(signal.SIGINT, note_signal)
signal.signal(signal.SIGTERM, note_signal)

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

epoch_done = tf.Variable(0, dtype=tf.int64)
checkpoint = tf.train.Checkpoint(model=model, epoch=epoch_done)
manager = tf.train.CheckpointManager(checkpoint, "tf_ckpts", max_to_keep=3)
if manager.latest_checkpoint:
    checkpoint.restore(manager.latest_checkpoint)
    print(f"restored {manager.latest_checkpoint}")

for epoch in range(int(epoch_done), EPOCHS):
    if stop_training or custom_termination:
        break
    for first in range(0, 64, 16):
        model.train_on_batch(train_x[first : first + 16], train_y[first : first + 16])
        time.sleep(0.005)  # stands for a larger model
    epoch_done.assign(epoch + 1)
    check_termination(float(model.evaluate(val_x, val_y, batch_size=32, verbose=0)))
    print(f"epoch {epoch}: {best:.4f}, saved as {manager.save()}")

print(f"saved as {manager.save()}")
weights = np.concatenate([weight.numpy().ravel() for weight in model.weights])
print("weights", hashlib.sha256(weights.tobytes()).hexdigest())
