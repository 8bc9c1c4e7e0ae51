"""A training without a framework whose metrics go to loggers; the hash is that of light.py's.

Its arguments: the folder, the loggers, and for how many steps. `at` is the step itself. The first
life holds at the step that is given until somebody makes a file, or kills it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from light import make_weights, show_hash, train_one, wait_for

import holdfast


def add_logger(run: holdfast.Run, kind: str, folder: str) -> None:
    if kind == "tensorboard":
        holdfast.loggers.TensorBoard(run, f"{folder}-tensorboard")
    elif kind == "wandb":
        holdfast.loggers.WandB(run, project="tests", mode="offline")
    elif kind == "wandb-online":
        holdfast.loggers.WandB(run, project="tests", settings={"init_timeout": 5})
    elif kind == "mlflow":
        holdfast.loggers.MLflow(run, tracking_uri=f"{folder}-mlflow", experiment="tests")


def wait_until_logged(folder: str, kinds: list[str], step: int) -> None:
    """Until all loggers have noted the step: what is killed then has logged it."""
    for kind in kinds:
        state = Path(folder) / "loggers" / f"{kind.partition('-')[0]}.json"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if state.exists():
                marks = [mark for mark, _ in json.loads(state.read_text())["last"].values()]
                if max(marks, default=-1) >= 2 * step:
                    break
            time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("loggers", nargs="*")
    parser.add_argument("--total", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=0, help="each of 50 steps, with validation")
    parser.add_argument("--hold-at", type=int, default=-1)
    parser.add_argument("--fork", action="store_true", help="leave a process that holds all pipes")
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--settings", default="{}")
    parser.add_argument("--few-rows", action="store_true", help="a queue that is full soon")
    options = parser.parse_args()
    if options.few_rows:
        from holdfast.loggers import _logger, _process

        _logger._MOST_ROWS, _logger._END_SECONDS, _process._PIPE_BYTES = 50, 1.0, 4096
    weights = make_weights()
    gate = Path(f"{options.folder}.gate")
    settings = holdfast.Settings(**json.loads(options.settings))
    with holdfast.Run(options.folder, settings=settings, weights=weights) as run:
        for kind in options.loggers:
            add_logger(run, kind, options.folder)
        if options.fork and os.fork() == 0:
            time.sleep(600)
            os._exit(0)
        run.log(begun=1.0)
        print("ready", run.step, run.resumed_from, run.attempt, flush=True)

        def train() -> None:
            step = run.step
            train_one(weights)
            run.log(at=step, mean=weights.mean())
            if step == options.hold_at and run.attempt == 1:
                wait_until_logged(options.folder, options.loggers, step)
                print("holding", flush=True)
                wait_for(gate)
            time.sleep(options.sleep)

        if options.epochs:
            for epoch in run.epochs(options.epochs):
                run.log(epoch=float(epoch))
                for _ in run.batches(range(50)):
                    train()
                with run.phase("validation"):
                    run.log(validated=run.step)
        else:
            for _ in run.steps(options.total):
                train()
    show_hash(weights)


if __name__ == "__main__":
    main()
