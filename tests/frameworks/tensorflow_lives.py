"""Trainings of TensorFlow that are stopped and go on, many in one process: it takes long to load.

Each life makes all of its objects anew. Prints a line of JSON for each scenario.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import holdfast

EPOCHS = 3
SPEC = tf.TensorSpec((), tf.int64)
numbers = tf.data.Dataset.range


class Life:
    """One life of a training; it is stopped where it is told to."""

    def __init__(self, folder: Path, stop: str) -> None:
        tf.random.set_seed(3)
        tf.random.set_global_generator(tf.random.Generator.from_seed(5))
        random.seed(1)
        np.random.seed(1)
        self.folder = folder
        self.stop = stop
        self.seen: list[Any] = []

    def see(self, run: holdfast.Run, *values: Any) -> None:
        self.seen.append([run.epoch, *[_plain(value) for value in values]])
        if f"step {run.step + 1}" == self.stop:
            run.stop()

    def turn(self, run: holdfast.Run) -> None:
        if f"turn {run.epoch}" == self.stop:
            run.stop()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, tf.distribute.DistributedValues):
        return [_plain(item) for item in value.values]
    found = value.numpy() if hasattr(value, "numpy") else value
    return found.tolist() if hasattr(found, "tolist") else found


def train_on(make: Callable[[], Any]) -> Callable[[Life], None]:
    """A training that sees the batches of a source, or of a new one for each epoch."""

    def train(life: Life) -> None:
        source = make()
        count = tf.Variable(0.0)
        with holdfast.Run(life.folder, count=count) as run:
            for _ in run.epochs(EPOCHS):
                given = source
                if not isinstance(source, tf.data.Dataset) and callable(source):
                    given = source()
                for batch in run.batches(given):
                    count.assign_add(1.0)
                    life.see(run, batch, count)
                life.turn(run)

    return train


def _generate() -> Iterator[int]:
    yield from range(24)


def _generate_random() -> Callable[[], Any]:
    generator = np.random.default_rng(3)

    def generate() -> Iterator[int]:
        for _ in range(24):
            yield int(generator.integers(1000))

    return generate


def _derived() -> Any:
    shuffled = numbers(24).shuffle(10)
    return lambda: shuffled.batch(4)


def _distributed() -> Any:
    strategy = tf.distribute.MirroredStrategy(["cpu:0"])
    return strategy.experimental_distribute_dataset(numbers(24).shuffle(10).batch(4))


def _large() -> Any:
    rows = np.arange(24 * 500_000, dtype="f").reshape(24, 500_000)
    return tf.data.Dataset.from_tensor_slices(rows).shuffle(30).map(lambda row: row[0]).batch(4)


def _pairs() -> Any:
    both = numbers(24).shuffle(10).map(lambda x: (x * 2, x), num_parallel_calls=2)
    return both.batch(4).prefetch(2)


def _interleaved() -> Any:
    def some(number: Any) -> Any:
        return numbers(4).map(lambda x: x + 10 * number)

    mixed = numbers(6).interleave(some, num_parallel_calls=2).shuffle(4)
    return mixed.batch(4).prefetch(tf.data.AUTOTUNE)


DATASETS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: numbers(24).shuffle(10).batch(4),
    "prefetched pairs": _pairs,
    "cached": lambda: numbers(24).cache().shuffle(10).batch(4),
    "interleaved": _interleaved,
    "of unknown length": lambda: numbers(24).filter(lambda x: x % 5 > 0).shuffle(9).batch(4),
    "shuffled twice": lambda: numbers(24).shuffle(24).filter(lambda x: x > 2).shuffle(9).batch(4),
    "repeated in an epoch": lambda: numbers(12).shuffle(9).map(lambda x: x * 2).repeat(2).batch(4),
    "one behind another": lambda: (
        numbers(12).shuffle(9).concatenate(numbers(12).shuffle(8)).batch(4).prefetch(1)
    ),
    "with buffers too large to keep": _large,
    "with a random op in map": lambda: (
        numbers(24).shuffle(10).map(lambda x: x + tf.random.uniform((), 0, 500, tf.int64)).batch(4)
    ),
    "of a generator": lambda: (
        tf.data.Dataset.from_generator(_generate, output_signature=SPEC).shuffle(5).batch(4)
    ),
    "of a generator that draws": lambda: tf.data.Dataset.from_generator(
        _generate_random(), output_signature=SPEC
    ).batch(4),
    "derived anew in each epoch": _derived,
    "made anew in each epoch": lambda: lambda: numbers(24).shuffle(10).batch(4),
    "distributed": _distributed,
}


class Net(tf.Module):
    """Variables in all the places where a module may have them."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.weight = tf.Variable(tf.random.normal([width, 1]))
        self.same = self.weight
        self.inner = [tf.Variable(2.0), {"a": tf.Variable(3, dtype=tf.int64)}]
        self.noise = tf.random.Generator.from_seed(1)
        self.call = tf.function(lambda x: x)
        self.half = tf.Variable(tf.cast([1.5, 2.25], tf.bfloat16))
        self.free = tf.Variable([1.0], shape=tf.TensorShape([None]))


def train_objects(life: Life) -> None:
    """Every kind of object that can be a state, in one loop of steps."""
    net, iterator = Net(), iter(numbers(100).shuffle(20).repeat().batch(4).prefetch(2))
    noise = tf.random.Generator.from_seed(7)
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    checkpoint = tf.train.Checkpoint(net=net, step=tf.Variable(0), more=[tf.Variable(1.0)])
    sparse = tf.sparse.from_dense([[1, 0], [0, 2]])
    state: dict[str, Any] = {"table": table, "sparse": sparse, "words": tf.constant(["a", "b"])}
    state |= {"net": net, "iterator": iterator, "noise": noise, "checkpoint": checkpoint}
    state |= {"type": tf.bfloat16, "total": tf.constant(0.0), "list": [tf.Variable(1.0)]}

    @tf.function
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(batch, tf.float32) @ net.weight) ** 2)
        net.weight.assign_sub(1e-4 * tape.gradient(loss, net.weight))
        return loss

    with holdfast.Run(life.folder, **state) as run:
        for number in run.steps(8):
            batch = next(iterator)
            drawn = tf.random.normal([4, 1]) + noise.normal([4, 1]) + net.noise.normal([4, 1])
            drawn += tf.random.get_global_generator().normal([4, 1])
            net.weight.assign_add(drawn)
            loss = step(batch[None, :])
            net.free.assign(tf.concat([net.free, [loss]], 0))
            net.half.assign_add(tf.cast([0.25, 1], tf.bfloat16))
            checkpoint.step.assign_add(1)
            checkpoint.more[0].assign(checkpoint.more[0] * 1.5)
            table.insert(tf.constant([str(number)]), tf.constant([number], tf.int64))
            run.update(total=run.state["total"] + loss)
            with run.phase("eval"):
                tf.random.normal([3])
            held = (
                net.weight,
                tf.cast(net.half, tf.float32),
                checkpoint.step,
                table.size(),
                net.free,
            )
            life.see(run, batch, loss, *held, run.state["total"], checkpoint.more[0])
        assert run.state["words"].numpy().tolist() == [b"a", b"b"]
        assert tf.sparse.to_dense(run.state["sparse"]).numpy().tolist() == [[1, 0], [0, 2]]
        assert run.state["type"] is tf.bfloat16


def train_an_iterator(life: Life) -> None:
    """An iterator in run.batches, that the script has made and drawn from already."""
    iterator = iter(numbers(40).shuffle(10).batch(2).prefetch(2))
    next(iterator)
    with holdfast.Run(life.folder, count=tf.Variable(0)) as run:
        for batch in run.batches(iterator):
            life.see(run, batch)
        run.finish()


def train_side_by_side(life: Life) -> None:
    """Two datasets as one, and code that draws around them."""
    left, right = numbers(24).shuffle(9).batch(4), numbers(100, 120).shuffle(9).batch(4)
    with holdfast.Run(life.folder, count=tf.Variable(0)) as run:
        for _ in run.epochs(EPOCHS):
            drawn = tf.random.uniform([2])
            for batch in run.batches(left, right):
                life.see(run, batch, drawn, tf.random.uniform([]))
            life.turn(run)


AT_EPOCHS = ("step 2", "step 6", "turn 1")
AT_ENDS = ("step 5", "step 6", "turn 1")
SCENARIOS: dict[str, tuple[Callable[[Life], None], tuple[str, ...]]] = {
    **{name: (train_on(make), AT_EPOCHS) for name, make in DATASETS.items()},
    "of unknown length": (train_on(DATASETS["of unknown length"]), AT_ENDS),
    "objects": (train_objects, ("step 3", "step 5")),
    "an iterator": (train_an_iterator, ("step 4", "step 11")),
    "side by side": (train_side_by_side, ("step 2", "step 5", "turn 1")),
}


def live(train: Callable[[Life], None], folder: Path, stop: str) -> Life:
    life = Life(folder, stop)
    with contextlib.suppress(holdfast.Stopped):
        train(life)
    return life


def play(name: str, place: Path) -> dict[str, Any]:
    """What an undisturbed training and one of several lives have seen, and what was said."""
    train, stops = SCENARIOS[name]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            whole = live(train, place / "whole", "").seen
            parts: list[Any] = []
            lives = []
            for stop in (*stops, ""):
                seen = live(train, place / "parts", stop).seen
                lives.append(len(seen))
                parts += seen
        except BaseException:  # noqa: BLE001  it goes to the test, whatever it is
            return {"name": name, "error": traceback.format_exc(), "said": said.getvalue()}
    return {"name": name, "whole": whole, "parts": parts, "lives": lives, "said": said.getvalue()}


if __name__ == "__main__":
    here = Path(sys.argv[1])
    for each in sys.argv[2:] or SCENARIOS:
        folder = here / each.replace(" ", "-")
        folder.mkdir(parents=True)
        print(json.dumps(play(each, folder)), flush=True)
