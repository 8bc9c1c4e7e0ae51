"""A training that keeps more and more memory, and one that has a child to lose.

Prints `ready STEP`, `child PID` where it has one, and `step N` for every step that is made.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np

import holdfast

_STEP_SECONDS = 0.02


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--total", type=int, default=100_000)
    parser.add_argument("--until", type=Path, help="the training is over once this file exists")
    parser.add_argument("--leak", type=float, default=0.0, help="megabytes a second")
    parser.add_argument("--leaks-in", type=int, default=0, help="the rank that does")
    parser.add_argument("--settings", default="{}", help="holdfast.Settings as JSON")
    parser.add_argument("--child", action="store_true", help="start a process that only waits")
    options = parser.parse_args()
    weights, kept = np.zeros(1000), []
    leaks = options.leak and int(os.environ.get("RANK", "0")) == options.leaks_in
    settings = holdfast.Settings(**json.loads(options.settings))
    with holdfast.Run(options.folder, settings=settings, weights=weights) as run:
        print("ready", run.step, flush=True)
        if options.child:
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            child.daemon = True
            child.start()
            print("child", child.pid, flush=True)
        last = time.monotonic()
        for step in run.steps(options.total):
            if options.until is not None and options.until.exists():
                break
            weights += 1
            time.sleep(_STEP_SECONDS)
            last, seconds = time.monotonic(), time.monotonic() - last
            if leaks:
                kept.append(np.ones(int(options.leak * 1e6 * seconds / 8)))
            print("step", step + 1, flush=True)
    print("oom_score_adj", Path("/proc/self/oom_score_adj").read_text().strip(), flush=True)


if __name__ == "__main__":
    main()
