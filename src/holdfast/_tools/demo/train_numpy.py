"""The demo's training, with NumPy alone: backward pass and AdamW by hand, and a kill -9."""

from __future__ import annotations

from typing import Any

import numpy as np

import holdfast
from holdfast._tools.demo import child

Arrays = dict[str, np.ndarray[Any, Any]]

_WIDTH = 128
_DROPPED = 0.1


def update(
    weights: Arrays, first: Arrays, second: Arrays, gradients: Arrays, rate: float, steps: int
) -> None:
    """AdamW: Adam with decoupled weight decay, with PyTorch's defaults."""
    for name, gradient in gradients.items():
        first[name] += 0.1 * (gradient - first[name])
        second[name] += 0.001 * (gradient * gradient - second[name])
        scale = np.sqrt(second[name] / (1 - 0.999**steps)) + 1e-8
        weights[name] -= rate * 0.01 * weights[name]
        weights[name] -= rate / (1 - 0.9**steps) * first[name] / scale


def make_weights() -> Arrays:
    generator = np.random.default_rng(0)
    sizes = [(2, _WIDTH), (_WIDTH, _WIDTH), (_WIDTH, 2)]
    weights: Arrays = {}
    for index, (inputs, outputs) in enumerate(sizes):
        scale = np.sqrt(2 / inputs)
        weights[f"w{index}"] = scale * generator.standard_normal((inputs, outputs))
        weights[f"b{index}"] = np.zeros(outputs)
    return weights


def predict(weights: Arrays, points: Any, masks: list[Any]) -> tuple[Any, list[Any]]:
    """Scores of the two spirals, and the input of each layer."""
    given = [points]
    for index in range(2):
        hidden = np.maximum(given[-1] @ weights[f"w{index}"] + weights[f"b{index}"], 0)
        given.append(hidden * masks[index] if masks else hidden)
    return given[-1] @ weights["w2"] + weights["b2"], given


def find_gradients(weights: Arrays, points: Any, labels: Any) -> tuple[float, Arrays]:
    """Loss and gradients of one batch, with dropout from NumPy's global generator."""
    count = len(points)
    masks = [(np.random.random((count, _WIDTH)) >= _DROPPED) / (1 - _DROPPED) for _ in range(2)]
    scores, given = predict(weights, points, masks)
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances = scores / scores.sum(axis=1, keepdims=True)
    loss = -np.log(chances[np.arange(count), labels]).mean()
    error = chances
    error[np.arange(count), labels] -= 1
    error /= count
    gradients: Arrays = {}
    for index in (2, 1, 0):
        gradients[f"w{index}"] = given[index].T @ error
        gradients[f"b{index}"] = error.sum(axis=0)
        if index:
            error = error @ weights[f"w{index}"].T * masks[index - 1] * (given[index] > 0)
    return float(loss), gradients


def main() -> None:
    arguments = child.parse_arguments()
    np.random.seed(0)
    found, kinds = child.make_spirals()
    points, labels = np.array(found), np.array(kinds)
    weights = make_weights()
    first, second = ({name: np.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    shuffler = np.random.default_rng(1)
    order = np.zeros(child.POINTS, dtype=np.int64)
    run = holdfast.Run(
        arguments.folder,
        settings=child.settings(),
        weights=weights,
        first=first,
        second=second,
        shuffler=shuffler,
        order=order,
    )
    with run:
        child.report(begin=run.step)
        if arguments.sabotage:
            weights["w0"][0, 0] += 1e-3
        per_epoch = child.POINTS // child.BATCH
        for step in run.steps(arguments.steps):
            if step % per_epoch == 0:
                order[:] = shuffler.permutation(child.POINTS)
            start = step % per_epoch * child.BATCH
            batch = order[start : start + child.BATCH]
            loss, gradients = find_gradients(weights, points[batch], labels[batch])
            if step == arguments.kill_at and run.attempt == 1:
                child.die_at_once()
            update(weights, first, second, gradients, rate=5e-3, steps=step + 1)
            run.log(loss=loss)
            child.report(step=step + 1)
    state = {"weights": weights, "first": first, "second": second}
    digests = {
        f"{part}.{name}": child.digest(value.tobytes())
        for part, arrays in state.items()
        for name, value in arrays.items()
    }
    digests["order"] = child.digest(order.tobytes())
    digests["shuffler"] = child.digest(repr(shuffler.bit_generator.state).encode())
    keys = np.random.get_state(legacy=False)["state"]
    digests["dropout's generator"] = child.digest(keys["key"].tobytes() + b"%d" % keys["pos"])
    scores, _ = predict(weights, points, [])
    accuracy = float((scores.argmax(axis=1) == labels).mean())
    child.report(digests=digests, accuracy=accuracy)


if __name__ == "__main__":
    main()
