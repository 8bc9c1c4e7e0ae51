"""A training without a framework, which starts in a fraction of a second.

Prints the same lines as train.py: `ready STEP RESUMED_FROM ATTEMPT`, `hash HEX`, and where a
step is held up `holding STEP_IN_MEMORY`. Small scripts of the tests import its parts.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import random
import time
from pathlib import Path

import numpy as np
from patience import wait_for_due

import holdfast
from holdfast._run.driver import session_of


def make_weights(size: int = 1000) -> np.ndarray:
    np.random.seed(7)
    random.seed(7)
    return np.zeros(size)


def train_one(weights: np.ndarray) -> None:
    """One step, in place; it draws from both generators."""
    weights += np.random.standard_normal(weights.size) * random.random()
    np.tanh(weights, out=weights)


def show_hash(weights: np.ndarray) -> None:
    """Of weights and generators: equal only if every bit is."""
    digest = hashlib.sha256(weights.tobytes())
    digest.update(np.random.get_state()[1].tobytes() + repr(random.getstate()).encode())
    print("hash", digest.hexdigest(), flush=True)


def show_holding(run: holdfast.Run) -> None:
    newest = session_of(run).saver.newest
    print("holding", newest.step if newest else None, flush=True)


def wait_for(path: Path, seconds: float = 60.0) -> None:
    """Stay in this step until the test makes a file, in short calls."""
    deadline = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.005)


def stick_in_c(*, with_gil: bool) -> None:
    """A C call that never returns, not even for a signal: a lock that is taken twice."""
    library = ctypes.PyDLL(None) if with_gil else ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(128)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--total", type=int, default=300)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds added to each step")
    parser.add_argument(
        "--patience", type=float, help="seconds for what is due on disk, until the gate"
    )
    parser.add_argument("--size", type=int, default=1000, help="number of weights")
    parser.add_argument("--settings", default="{}", help="holdfast.Settings as JSON")
    parser.add_argument("--hold-at", type=int, nargs="+", default=[], help="steps that are held up")
    parser.add_argument(
        "--gate", type=Path, help="the file for which the first waits; then GATE2, …"
    )
    parser.add_argument("--stick", choices=("with-gil", "without-gil"), help="or for ever, in C")
    parser.add_argument("--once", action="store_true", help="hold up only the first attempt")
    parser.add_argument("--room", type=int, help="pretend that so many bytes of memory are free")
    options = parser.parse_args()
    if options.room is not None:
        from holdfast._store.memory import backing

        backing.available_bytes = lambda: options.room
    weights = make_weights(options.size)
    settings = holdfast.Settings(**json.loads(options.settings))
    with holdfast.Run(options.folder, settings=settings, weights=weights) as run:
        print("ready", run.step, run.resumed_from, run.attempt, flush=True)
        for step in run.steps(options.total):
            train_one(weights)
            if step in options.hold_at and (run.attempt == 1 or not options.once):
                show_holding(run)
                if options.stick:
                    stick_in_c(with_gil=options.stick == "with-gil")
                number = options.hold_at.index(step) + 1
                wait_for(Path(f"{options.gate}{number if number > 1 else ''}"))
            if options.patience and not (options.gate and options.gate.exists()):
                every = int(settings.checkpoint_every)
                wait_for_due(Path(options.folder), step, every, options.patience)
            time.sleep(options.sleep)
    show_hash(weights)


if __name__ == "__main__":
    main()
