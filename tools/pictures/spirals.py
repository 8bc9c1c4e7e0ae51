"""The training of the report's picture: two spirals, learned slowly enough to be interrupted.

With NumPy alone, since it starts in a moment: the picture is about interruptions, not imports.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import holdfast

STEPS, BATCH, HIDDEN, RATE = 1600, 64, 128, 4e-4
Arrays = dict[str, np.ndarray]


def make_spirals(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    turn, side = np.sqrt(draw.random(count)) * 7, draw.integers(2, size=count)
    angle = turn + side * np.pi
    points = np.stack([turn * np.cos(angle), turn * np.sin(angle)], 1) / 3
    return points + 0.05 * draw.normal(size=points.shape), side


def loss_of(weights: Arrays, points: np.ndarray, side: np.ndarray) -> tuple[float, float, Arrays]:
    """The loss, the share that is right, and the gradients."""
    hidden = np.maximum(points @ weights["in"] + weights["shift"], 0)
    middle = np.maximum(hidden @ weights["middle"], 0)
    chance = np.exp(middle @ weights["out"])
    chance /= chance.sum(1, keepdims=True)
    rows = np.arange(len(side))
    loss = float(-np.log(chance[rows, side] + 1e-9).mean())
    right = float((chance.argmax(1) == side).mean())
    chance[rows, side] -= 1
    back = chance / len(side)
    to_middle = (back @ weights["out"].T) * (middle > 0)
    to_hidden = (to_middle @ weights["middle"].T) * (hidden > 0)
    return loss, right, {
        "out": middle.T @ back,
        "middle": hidden.T @ to_middle,
        "in": points.T @ to_hidden,
        "shift": to_hidden.sum(0),
    }  # fmt: skip


def main(folder: str) -> None:
    np.random.seed(0)
    points, side = make_spirals(1280, 1)
    others, other_side = make_spirals(320, 2)
    shapes = {"in": (2, HIDDEN), "shift": (HIDDEN,), "middle": (HIDDEN, HIDDEN), "out": (HIDDEN, 2)}
    weights = {k: np.random.normal(size=s) * (2 / s[0]) ** 0.5 for k, s in shapes.items()}
    weights["shift"] *= 0
    first = {name: np.zeros(shape) for name, shape in shapes.items()}
    second = {name: np.zeros(shape) for name, shape in shapes.items()}
    settings = holdfast.Settings(checkpoint_every="5s")
    with holdfast.Run(folder, settings=settings, weights=weights, m=first, v=second) as run:
        for step in run.steps(STEPS):
            chosen = np.random.randint(len(points), size=BATCH)
            loss, _, gradients = loss_of(weights, points[chosen], side[chosen])
            for name, gradient in gradients.items():
                first[name] += 0.1 * (gradient - first[name])
                second[name] += 0.001 * (gradient**2 - second[name])
                late = 1 - 0.999 ** (step + 1)
                weights[name] -= RATE * first[name] / (np.sqrt(second[name] / late) + 1e-8)
            run.log(loss=loss)
            time.sleep(0.035)  # stands for a larger model
            if (step + 1) % 100 == 0:
                with run.phase("eval"):
                    time.sleep(0.6)  # and for a longer evaluation
                    loss, right, _ = loss_of(weights, others, other_side)
                    run.log(val_loss=loss, accuracy=right)


if __name__ == "__main__":
    main(sys.argv[1])
