"""A small training for jobs: train.py RUN STEPS SECONDS-A-STEP; its end goes to RUN.npy."""

from __future__ import annotations

import sys
import time

import numpy

import holdfast

folder, steps, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
numpy.random.seed(0)
weights = numpy.zeros(64)
with holdfast.Run(folder, weights=weights) as run:
    print(f"attempt {run.attempt} begins at step {run.step}", flush=True)
    for _ in run.steps(steps):
        weights *= 0.99
        weights += numpy.random.standard_normal(64)
        time.sleep(seconds)
numpy.save(f"{folder}.npy", weights)
print("trained", flush=True)
