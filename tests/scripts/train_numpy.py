"""A training without a framework that logs metrics, for the tests of the command line.

Prints the same lines as train.py: `ready STEP RESUMED_FROM ATTEMPT` and `done`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from patience import wait_for_due

import holdfast


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--total", type=int, default=100_000)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds added to each step")
    parser.add_argument("--patience", type=float, help="seconds in a step for what is due on disk")
    parser.add_argument("--settings", default="{}", help="holdfast.Settings as JSON")
    parser.add_argument("--best-at", type=int, default=-1, help="step with the lowest val_loss")
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--bare-loop", action="store_true", help="run.boundary(), not run.steps")
    parser.add_argument("--room", type=int, help="pretend that so many bytes of memory are free")
    parser.add_argument("--no-shm", action="store_true", help="pretend that /dev/shm is full")
    options = parser.parse_args()
    if options.room is not None or options.no_shm:
        from holdfast._store.memory import backing

        if options.room is not None:
            backing.available_bytes = lambda: options.room
        if options.no_shm:
            backing._reserve_shm = lambda *_: None
    weights = np.zeros(1000)
    settings = holdfast.Settings(**json.loads(options.settings))
    with holdfast.Run(options.folder, settings=settings, weights=weights) as run:
        print("ready", run.step, run.resumed_from, run.attempt, flush=True)

        def train(step: int) -> None:
            weights.__iadd__(np.random.standard_normal(weights.size))
            if step == options.raise_at:
                raise ValueError("planted")
            run.log(loss=1.0 / (1 + step), val_loss=0.1 if step + 1 == options.best_at else 0.5)
            if options.patience:
                every = int(settings.checkpoint_every)
                wait_for_due(Path(options.folder), step, every, options.patience)
            time.sleep(options.sleep)

        if options.bare_loop:
            for step in range(options.total):
                train(step)
                if run.boundary():
                    break
        else:
            for step in run.steps(options.total):
                train(step)
    print("done", flush=True)


if __name__ == "__main__":
    main()
