"""TensorFlow: a tf.Module, a compiled GradientTape step, a shuffled tf.data set, no Keras."""

from __future__ import annotations

import task
import tensorflow as tf

import holdfast

tf.random.set_seed(3)
data = tf.data.Dataset.from_tensor_slices((task.INPUTS, task.TARGETS))
data = data.shuffle(task.SAMPLES, seed=3).batch(task.BATCH)


class Net(tf.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = tf.Variable(task.initial(6, task.HIDDEN))
        self.second = tf.Variable(task.initial(task.HIDDEN, 1))

    def __call__(self, inputs, generator=None):
        hidden = tf.tanh(inputs @ self.first)
        if generator is not None:
            drawn = generator.uniform(tf.shape(hidden))
            hidden *= tf.cast(drawn >= task.DROPPED, tf.float32)
        return hidden @ self.second


net = Net()
speeds = [tf.Variable(tf.zeros_like(variable)) for variable in net.trainable_variables]
generator = tf.random.Generator.from_seed(3)


@tf.function
def learn(inputs, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((net(inputs, generator) - targets) ** 2)
    gradients = tape.gradient(loss, net.trainable_variables)
    for variable, speed, gradient in zip(net.trainable_variables, speeds, gradients, strict=True):
        speed.assign(0.9 * speed + gradient)
        variable.assign_sub(task.RATE * speed)
    return loss


state = {"net": net, "speeds": speeds, "generator": generator}
with holdfast.Run(task.FOLDER, settings=task.SETTINGS, **state) as run:
    for _ in run.epochs(task.EPOCHS):
        for inputs, targets in run.batches(data):
            # Noise by the global seed, as an augmentation in the loop would draw it.
            inputs += tf.random.normal(inputs.shape, stddev=0.01)
            run.log(loss=learn(inputs, targets))
        with run.phase("eval"):
            run.log(val_loss=tf.reduce_mean((net(task.INPUTS) - task.TARGETS) ** 2))
