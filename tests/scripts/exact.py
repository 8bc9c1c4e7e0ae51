"""A training in whole numbers: every machine computes the same bits, so a stored run fits all.

exact.py FOLDER numpy|torch|ranks --total N [--stop-at STEP]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import time

import numpy as np

import holdfast


def train_numpy(options: argparse.Namespace) -> None:
    np.random.seed(7)
    random.seed(7)
    weights = np.zeros(100, dtype=np.int64)
    with holdfast.Run(options.folder, weights=weights) as run:
        print("ready", run.step, flush=True)
        for step in run.steps(options.total):
            weights += np.random.randint(-1000, 1000, weights.size) * random.randrange(9)
            if step + 1 == options.stop_at:
                os.kill(os.getpid(), signal.SIGTERM)
    show(weights.tobytes(), repr(random.getstate()).encode())


def train_torch(options: argparse.Namespace) -> None:
    import torch

    torch.manual_seed(7)
    weights = torch.zeros(100, dtype=torch.int64)
    loader = torch.utils.data.DataLoader(torch.arange(40), batch_size=4, shuffle=True)
    with holdfast.Run(options.folder, weights=weights) as run:
        print("ready", run.step, flush=True)
        for _ in run.epochs(options.total // 10):
            for batch in run.batches(loader):
                weights += batch.sum() * torch.randint(-9, 9, (100,))
                if run.step + 1 == options.stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)
    show(weights.numpy().tobytes(), torch.get_rng_state().numpy().tobytes())


def train_ranks(options: argparse.Namespace) -> None:
    """Two ranks that meet in the run folder; each has its own weights."""
    rank = int(os.environ["RANK"])
    np.random.seed(rank)
    weights = np.zeros(100, dtype=np.int64)
    with holdfast.Run(options.folder, weights=weights) as run:
        print("ready", run.step, flush=True)
        for step in run.steps(options.total):
            weights += np.random.randint(-1000, 1000, weights.size)
            if options.stop_at:
                time.sleep(0.05)  # until the ranks have agreed where to stop
            if step + 1 == options.stop_at and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
    show(weights.tobytes(), b"")


def show(*parts: bytes) -> None:
    print("hash", hashlib.sha256(b"".join(parts)).hexdigest(), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("kind", choices=["numpy", "torch", "ranks"])
    parser.add_argument("--total", type=int, default=30)
    parser.add_argument("--stop-at", type=int)
    options = parser.parse_args()
    {"numpy": train_numpy, "torch": train_torch, "ranks": train_ranks}[options.kind](options)


if __name__ == "__main__":
    main()
