"""Plain NumPy: an object with state_dict and load_state_dict, arrays, and the global generator."""

from __future__ import annotations

import numpy as np
import task

import holdfast


class Net:
    """One hidden layer, trained with momentum by hand."""

    def __init__(self) -> None:
        self.weights = [task.initial(6, task.HIDDEN), task.initial(task.HIDDEN, 1)]
        self.speeds = [np.zeros_like(weight) for weight in self.weights]

    def state_dict(self):
        return {"weights": self.weights, "speeds": self.speeds}

    def load_state_dict(self, state):
        self.weights, self.speeds = state["weights"], state["speeds"]

    def learn(self, inputs, targets):
        first, second = self.weights
        kept = np.random.random((len(inputs), task.HIDDEN)) >= task.DROPPED
        hidden = np.tanh(inputs @ first) * kept
        error = hidden @ second - targets
        back = (error @ second.T) * (1 - hidden**2) * kept
        for weight, speed, gradient in zip(
            self.weights, self.speeds, (inputs.T @ back, hidden.T @ error), strict=True
        ):
            speed *= 0.9
            speed += (gradient / len(inputs)).astype(np.float32)
            weight -= np.float32(task.RATE) * speed
        return float((error**2).mean())

    def loss(self):
        hidden = np.tanh(task.INPUTS @ self.weights[0])
        return float(((hidden @ self.weights[1] - task.TARGETS) ** 2).mean())


np.random.seed(3)
net = Net()
# An array that a run is given by itself must keep its shape, as what an object has must not.
scale = np.ones(task.HIDDEN)
with holdfast.Run(task.FOLDER, settings=task.SETTINGS, net=net, scale=scale) as run:
    for _ in run.epochs(task.EPOCHS):
        order = np.random.permutation(task.SAMPLES).reshape(-1, task.BATCH)
        for chosen in run.batches(order):
            loss = net.learn(task.INPUTS[chosen], task.TARGETS[chosen])
            scale *= 0.99
            run.log(loss=loss)
        with run.phase("eval"):
            run.log(val_loss=net.loss())
