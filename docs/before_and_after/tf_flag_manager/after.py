"""Any signal is answered after a step; neither a flag nor a manager of checkpoints is needed."""

import hashlib
import time

import keras
import numpy as np
import tensorflow as tf

import holdfast

EPOCHS = 8

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


with holdfast.Run("run", model=model, optimizer=optimizer) as run:
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(dataset):
            loss = train_step(x, y)
            run.log(loss=loss)
            time.sleep(0.005)  # stands for a larger model

weights = np.concatenate([weight.numpy().ravel() for weight in model.weights])
print("weights", hashlib.sha256(weights.tobytes()).hexdigest())
