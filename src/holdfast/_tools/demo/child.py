"""What both trainings of the demo share: arguments, data, and how they speak to the story."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import signal
from dataclasses import dataclass

import holdfast

POINTS = 1024
BATCH = 128
CHECKPOINT_EVERY = 100  # steps; where there is no keeper, a kill costs up to as many


@dataclass(frozen=True, slots=True)
class Orders:
    """What the story wants of this life."""

    folder: str
    steps: int
    kill_at: int
    sabotage: bool


def take_orders() -> Orders:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--kill-at", type=int, default=-1)
    parser.add_argument("--sabotage", action="store_true")
    return Orders(**vars(parser.parse_args()))


def settings() -> holdfast.Settings:
    return holdfast.Settings(checkpoint_every=CHECKPOINT_EVERY)


def tell(**fields: object) -> None:
    """One line of JSON for the story."""
    print(json.dumps(fields), flush=True)


def make_spirals() -> tuple[list[tuple[float, float]], list[int]]:
    """Two spirals that wind around each other: the points, and which spiral each is of."""
    generator = random.Random(0)
    points, labels = [], []
    for index in range(POINTS):
        label = index % 2
        turn = math.sqrt(index / POINTS) * 3 * math.pi
        angle = turn + label * math.pi
        radius = turn / (3 * math.pi)
        points.append(
            (
                radius * math.cos(angle) + generator.gauss(0, 0.01),
                radius * math.sin(angle) + generator.gauss(0, 0.01),
            )
        )
        labels.append(label)
    return points, labels


def die_at_once() -> None:
    """kill -9 of this very process: no handler, no `finally`, no goodbye."""
    # Windows has no such signal, and ends a process as abruptly for any other.
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
