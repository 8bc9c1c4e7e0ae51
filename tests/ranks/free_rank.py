"""One rank that trains without a process group, as fast as it likes, beside others.

Prints `ready STEP`, `step N` when a step is made, `left STEP` when it leaves by an exception,
and `hash HEX` of its state and generators. Alone with `--plain` it trains without holdfast.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import random
import time

import numpy as np

import holdfast
from holdfast._run.saving import rank_orders

_WIDTH = 64


def begin(rank: int) -> np.ndarray:
    random.seed(rank)
    np.random.seed(rank)
    return np.zeros(_WIDTH)


def make_step(own: np.ndarray) -> None:
    own += np.random.standard_normal(_WIDTH) * random.random()
    np.tanh(own, out=own)


def show_hash(own: np.ndarray) -> None:
    digest = hashlib.sha256(own.tobytes() + np.random.get_state()[1].tobytes())
    digest.update(repr(random.getstate()).encode())
    print("hash", digest.hexdigest(), flush=True)


def train(options: argparse.Namespace) -> np.ndarray:
    if options.unreachable is not None:
        config = functools.partial(rank_orders.RankConfig, unreachable_seconds=options.unreachable)
        rank_orders.RankConfig = config
    own = begin(options.rank)
    settings = holdfast.Settings(**json.loads(options.settings))
    run = holdfast.Run(options.folder, settings=settings, own=own)
    try:
        with run:
            print("ready", run.step, flush=True)
            for _ in run.steps(options.total):
                make_step(own)
                time.sleep(options.pause)
                print("step", run.step + 1, flush=True)
    except BaseException:
        print("left", run.step, flush=True)
        raise
    return own


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--rank", type=int, required=True, help="for its seed")
    parser.add_argument("--total", type=int, default=1000)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds added to each step")
    parser.add_argument("--settings", default="{}", help="holdfast.Settings as JSON")
    parser.add_argument("--unreachable", type=float, help="seconds until a rank counts as lost")
    parser.add_argument("--plain", action="store_true", help="without holdfast")
    options = parser.parse_args()
    if options.plain:
        own = begin(options.rank)
        for _ in range(options.total):
            make_step(own)
    else:
        own = train(options)
    show_hash(own)


if __name__ == "__main__":
    main()
