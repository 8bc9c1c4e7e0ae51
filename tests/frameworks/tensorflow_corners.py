"""What is refused or said of TensorFlow's things; each corner gives back the sentences."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import holdfast
from holdfast.rules import NotFinite

numbers = tf.data.Dataset.range


def _train(folder: Path, state: dict[str, Any], steps: int = 1, do: Any = None) -> str:
    """Open a run with this state for some steps; what was refused."""
    try:
        with holdfast.Run(folder, **state) as run:
            for _ in run.steps(steps):
                if do is not None:
                    do()
    except holdfast.HoldfastError as error:
        return str(error)
    return ""


def other_shape(folder: Path) -> str:
    class Net(tf.Module):
        def __init__(self, width: int, more: bool = False) -> None:
            super().__init__()
            self.weight = tf.Variable(tf.zeros([width]))
            self.layers = [tf.Variable(1.0)] * (1 + more)

    _train(folder, {"net": Net(3), "bare": tf.Variable([1.0])})
    first = _train(folder, {"net": Net(4, True), "bare": tf.Variable([1.0, 2.0])}, 2)
    kept = tf.Variable([5.0])
    return first + _train(folder, {"net": Net(4), "bare": kept}, 2) + f"\nkept {kept.numpy()}"


def other_generator(folder: Path) -> str:
    _train(folder, {"noise": tf.random.Generator.from_seed(1)})
    other = tf.random.Generator.from_seed(1)
    other._alg = 2  # ThreeFry, which this machine's CPU has no op for
    return _train(folder, {"noise": other}, 2)


def session(folder: Path) -> str:
    with tf.Graph().as_default():
        return _train(folder, {"session": tf.compat.v1.Session()})


def graph_variable(folder: Path) -> str:
    with tf.Graph().as_default():
        alone = _train(folder, {"weight": tf.compat.v1.get_variable("w", [2])})
        return alone + _train(folder, {"all": [tf.compat.v1.get_variable("v", [2])]})


def old_optimizer(folder: Path) -> str:
    return _train(folder, {"optimizer": tf.compat.v1.train.AdamOptimizer()})


def strings(folder: Path) -> str:
    return _train(folder, {"words": tf.Variable(["a"])})


def quantized(folder: Path) -> str:
    return _train(folder, {"q": tf.bitcast(tf.constant([1], tf.int8), tf.qint8)})


def draws_in_function(folder: Path) -> str:
    @tf.function
    def make_noise() -> Any:
        return tf.random.normal([2])

    _train(folder, {"count": tf.Variable(0)}, 2, make_noise)
    return ""


def exact_draws_in_function(folder: Path) -> str:
    noise = tf.random.Generator.from_seed(1)

    @tf.function
    def draw_exactly() -> Any:
        return noise.normal([2]) + tf.random.stateless_normal([2], [1, 2])

    _train(folder, {"noise": noise}, 2, draw_exactly)
    return ""


def _batches_of(folder: Path, dataset: Any) -> str:
    with holdfast.Run(folder, count=tf.Variable(0)) as run:
        for _ in run.epochs(1):
            for _ in run.batches(dataset):
                pass
    return ""


def draws_in_parallel(folder: Path) -> str:
    tf.random.set_seed(1)
    drawn = numbers(8).map(
        lambda x: x + tf.random.uniform((), 0, 9, tf.int64), num_parallel_calls=2
    )
    return _batches_of(folder, drawn.batch(2))


def not_ordered(folder: Path) -> str:
    return _batches_of(
        folder, numbers(8).map(lambda x: x, num_parallel_calls=2, deterministic=False)
    )


def generator_runs_ahead(folder: Path) -> str:
    noise = tf.random.Generator.from_seed(1)
    drawn = numbers(8).map(lambda x: x + noise.uniform((), 0, 9, tf.int64)).prefetch(2)
    return _batches_of(folder, drawn)


def layer_runs_ahead(folder: Path) -> str:
    noise = keras.layers.GaussianNoise(0.5, seed=1)
    drawn = numbers(8).map(lambda x: noise(tf.cast(x, tf.float32), training=True))
    return _batches_of(folder, drawn)


def iterator_twice(folder: Path) -> str:
    iterator = iter(numbers(4))
    try:
        with holdfast.Run(folder, iterator=iterator) as run:
            for _ in run.batches(iterator):
                pass
    except holdfast.HoldfastError as error:
        return str(error)
    return ""


def other_dataset(folder: Path) -> str:
    """The script was changed between two lives."""
    seen: list[int] = []
    for dataset, stop in ((numbers(8).shuffle(4), 3), (numbers(8).batch(1).shuffle(4).take(8), 0)):
        with contextlib.suppress(holdfast.Stopped), holdfast.Run(folder, n=tf.Variable(0)) as run:
            for _ in run.epochs(1):
                for number in run.batches(dataset):
                    seen.append(int(np.ravel(number)[0]))
                    if run.step + 1 == stop:
                        run.stop()
    return f"{len(seen)} batches"


def keras_in_module(folder: Path) -> str:
    """Layers and optimizers of Keras that a module holds go on exactly."""

    class Net(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            keras.utils.set_random_seed(1)
            self.dense = keras.layers.Dense(2)
            self.dense.build((None, 3))
            self.optimizer = keras.optimizers.Adam(0.1)
            self.optimizer.build(self.dense.trainable_variables)

        def step(self) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self.dense(np.ones((2, 3), "f")) ** 2)
            weights = self.dense.trainable_variables
            self.optimizer.apply(tape.gradient(loss, weights), weights)

    def weights(lives: tuple[int, ...], place: Path) -> list[Any]:
        net = Net()
        for steps in lives:
            net = Net()
            _train(place, {"net": net}, steps, net.step)
        found: list[Any] = net.dense.kernel.numpy().tolist()
        return found

    is_same = weights((6,), folder / "whole") == weights((2, 4, 6), folder / "parts")
    return "same" if is_same else "other"


def nan_in_all_states(folder: Path) -> str:
    """A variable that is NaN in each saved state: none of them is left."""
    weight, settings = tf.Variable(tf.zeros([3])), holdfast.Settings(checkpoint_every=1)
    given = {"settings": settings, "stop_when": NotFinite(), "weight": weight}
    with contextlib.suppress(holdfast.Stopped), holdfast.Run(folder, **given) as run:
        for step in run.steps(6):
            weight.assign_add([float("nan")] * 3)
            if step == 4:
                run.log(loss=float("nan"))
    return f"left {[each.name for each in (folder / 'checkpoints').iterdir()]}"


def in_a_graph(folder: Path) -> str:
    """A whole training loop inside a tf.function has no boundaries that could be saved."""
    count = tf.Variable(0)

    @tf.function(autograph=False)
    def train() -> Any:
        with holdfast.Run(folder, count=count) as run:
            for _ in run.steps(2):
                count.assign_add(1)
        return count

    try:
        train()
    except holdfast.HoldfastError as error:
        return str(error)
    return ""


CORNERS: dict[str, Callable[[Path], str]] = {
    each.__name__: each
    for each in (
        other_shape,
        other_generator,
        session,
        graph_variable,
        old_optimizer,
        strings,
        quantized,
        exact_draws_in_function,  # before what makes them be noticed
        draws_in_function,
        draws_in_parallel,
        not_ordered,
        generator_runs_ahead,
        layer_runs_ahead,
        iterator_twice,
        other_dataset,
        keras_in_module,
        nan_in_all_states,
        in_a_graph,
    )
}


def find(name: str, folder: Path) -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            refused = CORNERS[name](folder)
        except BaseException as error:  # noqa: BLE001  it goes to the test, whatever it is
            refused = f"{type(error).__name__}: {error}"
    return {"name": name, "refused": refused, "said": said.getvalue()}


if __name__ == "__main__":
    import json

    for each in sys.argv[2:] or CORNERS:
        place = Path(sys.argv[1]) / each
        place.mkdir(parents=True)
        print(json.dumps(find(each, place / "run")), flush=True)
