"""A training of torch that hangs, or looks as if it did, in the way it is told to.

    hanging_torch.py HOW --run FOLDER [--timeout SECONDS]

It prints `ready PID` before the first step. The lines at which it then stands are marked.
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from measured import is_measured  # beside this one, which is run as a script
from torch.utils.data import DataLoader, Dataset

import holdfast

_USUAL_STEPS = 200  # before anything goes wrong
_LOCK = threading.Lock()


class _Samples(Dataset[int]):
    """Of a sudden it needs a lock, which nobody will ever give back to a forked worker."""

    def __init__(self, gate: Path) -> None:
        self._gate = gate

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        if self._gate.exists():
            with _LOCK:  # stuck: worker
                return index
        return index


def load_for_ever(run: holdfast.Run, folder: str) -> None:
    """The parent holds the lock at the moment of the fork; in its worker it stays held."""
    gate = Path(folder).parent / "gate"
    samples = _Samples(gate)
    loader = DataLoader(samples, batch_size=2, num_workers=1, multiprocessing_context="fork")
    with _LOCK:
        for _ in run.epochs(1):
            for _ in run.batches(loader):  # stuck: loader
                time.sleep(0.01)
                if is_measured(folder, run.step):
                    gate.touch()


class _Pictures(Dataset[torch.Tensor]):
    """They become too large for /dev/shm. A worker that cannot send one goes on without a word to
    the trainer."""

    def __init__(self, gate: Path) -> None:
        self._gate = gate

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones((32 << 20) if self._gate.exists() else 10)


def lose_a_batch(run: holdfast.Run, folder: str) -> None:
    gate = Path(folder).parent / "gate"
    loader = DataLoader(_Pictures(gate), batch_size=None, num_workers=1)
    for _ in run.epochs(1):
        for _ in run.batches(loader):  # stuck: lost batch
            time.sleep(0.01)
            if is_measured(folder, run.step):
                gate.touch()


def compile_in_every_step(run: holdfast.Run, folder: str) -> None:
    """Batches of ever another length, each of which is compiled for itself."""
    torch._dynamo.config.recompile_limit = 100_000
    torch._dynamo.config.accumulated_recompile_limit = 100_000

    def score(batch: torch.Tensor) -> torch.Tensor:
        return (batch.sin() * 2).sum()

    compiled = torch.compile(score, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    length = 2
    for step in run.steps(1_000_000):
        time.sleep(0.005)
        length += length > 2 or is_measured(folder, step)
        compiled(torch.ones(length))


def profile_memory(run: holdfast.Run, folder: str) -> None:
    """A profiler that keeps every call and every allocation, over many steps: it grows."""
    weight = torch.ones(4, 4)
    profiler = torch.profiler.profile(record_shapes=True, profile_memory=True, with_stack=True)
    profiled = 0
    for step in run.steps(1_000_000):
        if not profiled and step > _USUAL_STEPS and is_measured(folder, step):
            profiler.start()
            profiled = 1
        profiled += profiled > 0
        # When it is large enough to be seen, it has all the time in the world.
        time.sleep(0.005 if profiled < 800 else 0.2)
        for _ in range(200):
            weight = (weight @ weight).tanh()


_WAYS = {
    "loader": load_for_ever,
    "shm-full": lose_a_batch,
    "compile": compile_in_every_step,
    "profiler": profile_memory,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=_WAYS)
    parser.add_argument("--run", help="the folder of a run")
    parser.add_argument("--timeout", type=float, help="that is given; else it is learned")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    settings = holdfast.Settings(max_overhead=1.0, hang_timeout=options.timeout)
    with holdfast.Run(options.run, settings=settings, model=torch.nn.Linear(2, 2)) as run:
        print("ready", os.getpid(), flush=True)
        _WAYS[options.how](run, options.run)
    print("done", flush=True)


if __name__ == "__main__":
    main()
