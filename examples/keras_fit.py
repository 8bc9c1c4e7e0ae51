"""Keras: `model.fit` with a dropout, a validation and early stopping, as a run that cannot be lost.

    python examples/keras_fit.py

Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status runs` shows its pid), and
start the same command again: it goes on with the next batch of the same epoch, with its optimizer,
the means of the epoch and its history. However often you interrupt it, it ends with the same hash
of the weights.
"""

import argparse
import hashlib

import keras
import numpy as np

import holdfast
import holdfast.keras


def make_spirals(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points on three spirals; which one is to be told."""
    rng = np.random.default_rng(seed)
    which = np.arange(size) % 3
    radius = rng.random(size)
    angle = 4 * radius + 2 * np.pi / 3 * which + 0.2 * rng.standard_normal(size)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return points.astype("float32"), which


def make_model(hidden: int) -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Input((2,)),
            keras.layers.Dense(hidden, activation="relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(hidden, activation="relu"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.AdamW(3e-3),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=False,  # to compile takes longer than to train so small a model
    )
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default="runs/keras_fit")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--samples", type=int, default=6000)
    parser.add_argument("--hidden", type=int, default=64)
    arguments = parser.parse_args()

    keras.utils.set_random_seed(0)
    model = make_model(arguments.hidden)
    settle = keras.callbacks.ReduceLROnPlateau(patience=3, factor=0.5)
    enough = keras.callbacks.EarlyStopping(patience=8, restore_best_weights=True)

    with holdfast.Run(arguments.folder, model=model) as run:
        fitted = model.fit(
            *make_spirals(arguments.samples, seed=1),
            validation_data=make_spirals(600, seed=2),
            batch_size=32,
            epochs=arguments.epochs,
            verbose=0,
            callbacks=[holdfast.keras.Callback(run), settle, enough],
        )

    losses = fitted.history["val_loss"]
    digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights()))
    print(
        f"{len(losses)} epochs, best val_loss {min(losses):.4f}, weights {digest.hexdigest()[:16]}"
    )


if __name__ == "__main__":
    main()
