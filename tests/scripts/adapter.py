"""light.py with much that stays as it is: a training of an adapter on frozen weights."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from light import make_weights, show_hash, train_one
from patience import wait_for_due

import holdfast


def main() -> None:
    folder, total, settings = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    pause, patience = map(float, sys.argv[4:6] or ("0", "0"))
    weights = make_weights(2000)
    frozen = {f"layer{number}": np.full(20_000, number + 0.5) for number in range(5)}
    with holdfast.Run(
        folder, settings=holdfast.Settings(**settings), weights=weights, frozen=frozen
    ) as run:
        print("ready", run.step, run.resumed_from, run.attempt, flush=True)
        for step in run.steps(total):
            train_one(weights)
            wait_for_due(Path(folder), step, settings["checkpoint_every"], patience)
            time.sleep(pause)
    show_hash(np.concatenate([weights, *frozen.values()]))


if __name__ == "__main__":
    main()
