"""What the training of every framework learns, and how its run is kept: the same for all."""

from __future__ import annotations

import sys

import numpy as np

import holdfast

EPOCHS = 3
SAMPLES, BATCH = 96, 8
#: A net that is one wider does not fit a run of the others.
HIDDEN = 9 if "--wide" in sys.argv else 8
FOLDER = "run"
RATE = 0.02
DROPPED = 0.2

_drawn = np.random.default_rng(0).standard_normal((SAMPLES, 6)).astype(np.float32)
INPUTS = _drawn
TARGETS = np.sin(_drawn.sum(axis=1, keepdims=True)).astype(np.float32)

# The loss is greatest after the first epoch: so the "best" is none of the last checkpoints. A
# training of a second has no time for snapshots at all, unless they may take what they need.
SETTINGS = holdfast.Settings(
    keep_last=2, keep_best="max:val_loss", checkpoint_every=5, max_overhead=1.0
)


def initial(*shape: int) -> np.ndarray:
    """The weights that a net begins with."""
    return (np.random.default_rng(1).standard_normal(shape) * 0.4).astype(np.float32)
