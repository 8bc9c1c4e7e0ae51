"""The overhead of the default settings on one GPU, seen from outside.

    PYTHONPATH=.:src python bench/gpu_overhead.py [--sizes base,medium] [--steps 500] [--rounds 3]

Each round trains so many steps with `holdfast.Run` in a new folder, with default settings and only
the public API. Before and after each round the same loop runs without holdfast, and the round is
compared with the mean of the two: a GPU that gets warm becomes slower. The time is that of the
loop: from the first step to the end of the last one on the device. Not counted: the opening of the
run and its last checkpoint. A checkpoint every five minutes, which is the default, does not come in
a loop that is shorter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

import holdfast
from bench.gpu_save import Training


def seconds_of(training: Training, numbers: Iterable[int], steps: int) -> float:
    """The time of a loop over the first `steps` of these numbers."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for number in numbers:
        training.step()
        if number + 1 == steps:
            torch.cuda.synchronize()
            return time.perf_counter() - began
    raise AssertionError("the loop ended early")


def with_run(training: Training, folder: str, steps: int) -> float:
    state = {"model": training.model, "optimizer": training.optimizer}
    with holdfast.Run(Path(folder) / "run", **state) as run:
        return seconds_of(training, run.steps(steps), steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", default="base,medium")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    for size in options.sizes.split(","):
        training = Training(size)
        seconds_of(training, range(100), 100)
        plain = [seconds_of(training, range(options.steps), options.steps)]
        ours = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory() as folder:
                ours.append(with_run(training, folder, options.steps))
            plain.append(seconds_of(training, range(options.steps), options.steps))
        limits = map(statistics.mean, itertools.pairwise(plain))
        found = {
            "size": size,
            "step_ms": round(1e3 * statistics.median(plain) / options.steps, 2),
            "overhead_percent": [
                round(100 * (each / limit - 1), 2) for each, limit in zip(ours, limits, strict=True)
            ],
            "seconds_plain": [round(each, 3) for each in plain],
            "seconds_with_run": [round(each, 3) for each in ours],
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
