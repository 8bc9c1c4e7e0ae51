"""A strategy trains on two devices; SIGINT and SIGTERM set a flag, and the loop's end saves."""

import hashlib
import signal
import time

import keras
import numpy as np
import tensorflow as tf

STEPS = 48
SAVE_EVERY = 10

stop_training = False


def note_signal(number, _frame) -> None:
    global stop_training
    print(f"{signal.Signals(number).name}: stopping the training")
    stop_training = True


signal.signal(signal.SIGINT, note_signal)
signal.signal(signal.SIGTERM, note_signal)

devices = [tf.config.LogicalDeviceConfiguration()] * 2  # as if there were two GPUs
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], devices)
keras.utils.set_random_seed(8)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
inputs = np.random.normal(size=(128, 10)).astype("float32")
targets = (inputs[:, :1] * inputs[:, 1:2]).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((inputs, targets)).shuffle(128, seed=8).batch(16)
batches = strategy.experimental_distribute_dataset(dataset.repeat())

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

step = tf.Variable(0, dtype=tf.int64)
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)
manager = tf.train.CheckpointManager(checkpoint, "tf_ckpts", max_to_keep=3)
if manager.restore_or_initialize():
    print(f"restored {manager.latest_checkpoint}")


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


for x, y in batches:
    if stop_training or int(step) == STEPS:
        break
    loss = distributed_step(x, y)
    step.assign_add(1)
    time.sleep(0.005)  # stands for a larger model
    if int(step) % SAVE_EVERY == 0:
        print(f"step {int(step)}: loss {float(loss):.4f}, saved as {manager.save()}")

print(f"saved as {manager.save()}")
weights = np.concatenate([weight.numpy().ravel() for weight in model.weights])
print("weights", hashlib.sha256(weights.tobytes()).hexdigest())
