"""What both trainings of the demo share: arguments, data, and reports to the story."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import signal

import holdfast

POINTS = 1024
BATCH = 128
CHECKPOINT_EVERY = 100  # steps; without a keeper, a kill costs up to as many


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--sabotage", action="store_true")
    return parser.parse_args()


def settings() -> holdfast.Settings:
    return holdfast.Settings(checkpoint_every=CHECKPOINT_EVERY)


def report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def make_spirals() -> tuple[list[tuple[float, float]], list[int]]:
    """Two spirals that wind around each other: the points, and the spiral of each."""
    generator = random.Random(0)
    points, labels = [], []
    for index in range(POINTS):
        label = index % 2
        turn = math.sqrt(index / POINTS) * 3 * math.pi
        angle = turn + label * math.pi
        radius = turn / (3 * math.pi)
        x = radius * math.cos(angle) + generator.gauss(0, 0.01)
        y = radius * math.sin(angle) + generator.gauss(0, 0.01)
        points.append((x, y))
        labels.append(label)
    return points, labels


def die_at_once() -> None:
    """kill -9 of this process: no handler and no `finally` runs."""
    # Windows has no SIGKILL, and ends a process as abruptly for SIGTERM.
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
