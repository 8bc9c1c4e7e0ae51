"""A run whose checkpoints share what has not changed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import holdfast
from holdfast._record.layout import RunLayout

FROZEN, TRAINED = 4, 300  # tensors of 100 kB that stay as they are; numbers that do not


def state() -> dict[str, dict[str, np.ndarray]]:
    """Much that stays as it is, and little that changes."""
    random = np.random.default_rng(7)
    frozen = {f"layer{number}": random.random((125, 100)) for number in range(FROZEN)}
    return {"frozen": frozen, "trained": {"adapter": np.zeros(TRAINED)}}


def train(folder: Path, steps: int = 3, **settings: object) -> list[Path]:
    """Train with a checkpoint at each step; returns those that are kept, oldest first.

    All but the first hold `trained` and a link to the file of the first.
    """
    given = state()
    chosen = holdfast.Settings(**{"keep_last": 10, "checkpoint_every": "10h", **settings})
    with holdfast.Run(folder, settings=chosen, **given) as run:
        for _ in range(steps):
            given["trained"]["adapter"] += 1
            saved = run.save()
            run.boundary()
            saved.wait(60)
    return [path for _, _, path in RunLayout(folder).checkpoint_folders()]
