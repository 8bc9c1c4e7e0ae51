"""Fits of Keras that are stopped and go on: lives forked from one process that has imported it.

    python -m tests.frameworks.keras_lives FOLDER CASE…

Prints a line for each case: its name, and what differs from a fit that nobody has stopped.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

import holdfast
import holdfast.keras

BACKEND = keras.backend.backend()
if BACKEND == "tensorflow":
    import tensorflow as tf
SAMPLES, BATCH = 22, 4  # 6 batches in an epoch, the last of 2
IN_A_GRAPH = ("two-in-one", "scaled")
STOPS = (4, 6)  # in the middle of the first epoch, and behind its last batch


def make_arrays() -> tuple[Any, Any]:
    x = np.random.RandomState(0).rand(SAMPLES, 3).astype("float32")
    return x, (x.sum(1, keepdims=True) > 1.5).astype("float32")


class Noisy(keras.utils.PyDataset):
    """Makes batches with global random numbers, and shuffles between epochs, as many do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.x, self.y = make_arrays()
        self.order = np.arange(SAMPLES)

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __getitem__(self, index: int) -> Any:
        chosen = self.order[index * BATCH : (index + 1) * BATCH]
        noise = np.random.rand(len(chosen), 3).astype("float32")
        return self.x[chosen] + noise, self.y[chosen]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


def draw_for_ever() -> Iterator[Any]:
    x, y = make_arrays()
    while True:
        chosen = np.random.randint(0, SAMPLES, BATCH)
        yield x[chosen], y[chosen]


def make_loader() -> Any:
    import torch

    torch.manual_seed(7)  # Keras seeds that of its own backend
    samples = torch.utils.data.TensorDataset(*map(torch.tensor, make_arrays()))
    return torch.utils.data.DataLoader(samples, batch_size=BATCH, shuffle=True)


def make_dataset() -> Any:
    return tf.data.Dataset.from_tensor_slices(make_arrays()).shuffle(SAMPLES)


def data_of(case: str) -> dict[str, Any]:
    x, y = make_arrays()
    if case == "dataset":
        return {"x": make_dataset().batch(BATCH).prefetch(2)}
    if case == "repeated":
        return {"x": make_dataset().repeat().batch(BATCH), "steps_per_epoch": 6}
    if case == "of-unknown-length":
        return {"x": make_dataset().filter(lambda *_: True).batch(BATCH)}
    if case == "py-dataset":
        return {"x": Noisy()}
    if case == "generator":
        return {"x": draw_for_ever(), "steps_per_epoch": 6}
    if case == "loader":
        return {"x": make_loader()}
    more: dict[str, Any] = {
        "two-in-one": {"shuffle": "batch", "class_weight": {0: 1.0, 1: 2.0}},
        "scaled": {"sample_weight": np.linspace(0.5, 1, SAMPLES).astype("float32")},
    }.get(case, {})
    return {"x": x, "y": y, "batch_size": BATCH, **more}


def optimizer_of(case: str) -> Any:
    if case == "scaled":
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    if case == "repeated":
        return keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5)
    return keras.optimizers.Adam(0.05)


def callbacks_of(case: str, folder: Path) -> list[Any]:
    if case != "callbacks":
        return []
    known = keras.callbacks
    return [
        known.EarlyStopping("val_loss", patience=2, min_delta=0.5, restore_best_weights=True),
        known.ReduceLROnPlateau("loss", patience=1, min_delta=0.5, factor=0.5),
        known.LearningRateScheduler(lambda _, rate: rate * 0.9),
        known.ModelCheckpoint(str(folder / "best.weights.h5"), save_weights_only=True),
        known.CSVLogger(str(folder / "log.csv")),
    ]


class StopAt(keras.callbacks.Callback):
    def __init__(self, run: holdfast.Run, step: int | None) -> None:
        super().__init__()
        self.run, self.step = run, step
        self.seen: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(batch)
        if self.run.step + 1 == self.step:
            self.run.stop("the test")


def make_model(case: str) -> Any:
    keras.utils.set_random_seed(7)  # and no clear_session: names are others in each life
    layers = [keras.layers.Dense(4), keras.layers.Dropout(0.3), keras.layers.BatchNormalization()]
    layers.append(keras.layers.Dense(1, activation="sigmoid"))
    if case != "unbuilt":
        layers.insert(0, keras.layers.Input((3,)))
    model = keras.Sequential(layers)
    each = 2 if case == "two-in-one" else 1
    model.compile(
        optimizer_of(case),
        loss="binary_crossentropy",
        metrics=["accuracy"],
        run_eagerly=case not in IN_A_GRAPH and BACKEND != "jax",  # to trace takes seconds
        jit_compile=False,
        steps_per_execution=each,
    )
    return model


def live(folder: Path, part: str, cases: list[str], stop: int | None = None) -> dict[str, Any]:
    """One process, which trains the cases; one that stops can have only one."""
    left = folder / "left"
    child = os.fork()  # before anything was computed here, so there are no threads to lose
    if child == 0:
        results = {case: train(case, folder / case / part, stop) for case in cases}
        left.write_text(repr(results))
        sys.exit(0)
    _, status = os.waitpid(child, 0)
    expected = 0 if stop is None else 130
    assert os.waitstatus_to_exitcode(status) == expected, (part, cases, stop, status)
    found: dict[str, Any] = {} if stop is not None else ast.literal_eval(left.read_text())
    return found


def train(case: str, folder: Path, stop: int | None) -> list[Any]:
    model = make_model(case)
    validation = None if case == "unbuilt" else tuple(part[:8] for part in make_arrays())
    results: list[Any] = []
    with holdfast.Run(folder / "run", model=model) as run:
        for number in range(2 if case == "twice" else 1):
            fitted = model.fit(
                **data_of(case),
                validation_data=validation,
                epochs=3 if case == "callbacks" else 2,
                verbose=0,
                callbacks=[
                    *callbacks_of(case, folder)[:2],
                    holdfast.keras.Callback(run),
                    *callbacks_of(case, folder)[2:],
                    StopAt(run, stop),
                ],
            )
            results += [fitted.history, fitted.epoch, number]
        results.append(run.step)
    if case == "callbacks":
        results.append((folder / "log.csv").read_text())
    variables = [*model.variables, *model.optimizer.variables]
    arrays = [keras.ops.convert_to_numpy(variable.value) for variable in variables]
    return [*results, *(hashlib.sha256(array.tobytes()).hexdigest() for array in arrays)]


def differences(whole: list[Any], parts: list[Any]) -> str:
    found = [str(n) for n, (a, b) in enumerate(zip(whole, parts, strict=True)) if a != b]
    return ", ".join(found) or "nothing"


def main() -> None:
    warnings.simplefilter("ignore")  # of Keras: shuffle=True is ignored, the input ran out of data
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    for case in cases:
        for name in ("whole", "parts"):
            (folder / case / name).mkdir(parents=True)
    whole = live(folder, "whole", cases)
    for case in cases:
        for stop in STOPS if case in ("arrays", "dataset") else STOPS[:1]:
            live(folder, "parts", [case], stop)
    parts = live(folder, "parts", cases)
    again = live(folder, "parts", cases[:1])  # is finished, and leaves at once
    for case in cases:
        print(f"{case}: {differences(whole[case], parts[case])}", flush=True)
    print(f"again: {differences(whole[cases[0]], again[cases[0]])}", flush=True)


if __name__ == "__main__":
    main()
