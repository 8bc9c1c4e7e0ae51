"""SIGINT sets a flag; the epoch that sees it ends the loop; a CheckpointManager saves."""

import hashlib
import signal
import time

import keras
import numpy as np
import tensorflow as tf

EPOCHS = 8
SAVE_EVERY = 2

stop_training = False


def note_signal(_number, _frame) -> None:
    global stop_training
    print("SIGINT: stopping the training")
    stop_training = True


signal.signal(signal.SIGINT, note_signal)

keras.utils.set_random_seed(7)
images = np.random.normal(size=(96, 12)).astype("float32")
labels = (images[:, :6].sum(1) > images[:, 6:].sum(1)).astype("int32")
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(96).batch(16)
model = keras.Sequential(
    [
        keras.layers.Input((12,)),
        keras.layers.Dense(24, activation="relu"),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(2),
    ]
)
optimizer = keras.optimizers.Adam(3e-3)
loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        loss = loss_function(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return loss


epoch_done = tf.Variable(0, dtype=tf.int64)
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, epoch=epoch_done)
manager = tf.train.CheckpointManager(checkpoint, "tf_ckpts", max_to_keep=3)
if manager.latest_checkpoint:
    checkpoint.restore(manager.latest_checkpoint)
    print(f"restored {manager.latest_checkpoint}")

for epoch in range(int(epoch_done), EPOCHS):
    if stop_training:
        break
    for x, y in dataset:
        loss = train_step(x, y)
        time.sleep(0.005)  # stands for a larger model
    epoch_done.assign(epoch + 1)
    if epoch % SAVE_EVERY == 0:
        print(f"epoch {epoch}: loss {float(loss):.4f}, saved as {manager.save()}")

print(f"saved as {manager.save()}")
weights = np.concatenate([weight.numpy().ravel() for weight in model.weights])
print("weights", hashlib.sha256(weights.tobytes()).hexdigest())
