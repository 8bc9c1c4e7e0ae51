"""A small real training over one kind of loader, which notes every batch that it was given.

Each line of the trace is one batch: where it stands, the samples in it, and hashes of its
bytes and of the weights after it. What is random draws from torch, NumPy and Python alike.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import DataLoader

import holdfast
from tests.data.kinds import KINDS
from tests.data.sources import BATCH, Samples


class Trace:
    """Lines that are whole or not there, in a file that outlives its writer."""

    def __init__(self, path: Path, sleep_seconds: float, brake: int, brake_seconds: float) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._sleep_seconds = sleep_seconds
        self._left = brake
        self._brake_seconds = brake_seconds

    def note(self, run: Any, loop: str, number: int, batch: Any, model: Any) -> None:
        indices, samples = batch
        line = {
            "at": [run.epoch, loop, number],
            "step": run.step,
            "samples": torch.as_tensor(indices).reshape(-1).tolist(),
            "bytes": hash_of(samples),
            "weights": hash_of(*model.parameters()),
            "attempt": run.attempt,
        }
        os.write(self._file, json.dumps(line).encode() + b"\n")
        # A busy machine may hold up whoever wants to interrupt us: do not run away from it.
        self._left -= 1
        time.sleep(self._sleep_seconds if self._left >= 0 else self._brake_seconds)


def hash_of(*tensors: torch.Tensor) -> str:
    hasher = xxhash.xxh3_64()
    for tensor in tensors:
        hasher.update(tensor.detach().contiguous().numpy().tobytes())
    return hasher.hexdigest()


def hash_all(model: Any, optimizer: Any, scheduler: Any) -> str:
    """Of everything that a next step would depend on."""
    moments = [state["momentum_buffer"] for state in optimizer.state.values()]
    others = [random.getstate(), np.random.get_state(legacy=False), scheduler.state_dict()]
    hasher = xxhash.xxh3_64(repr(others).encode())
    hasher.update(hash_of(*model.parameters(), *moments, torch.get_rng_state()).encode())
    return hasher.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("folder", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("result", type=Path, help="gets the hashes when the training is complete")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds added to each batch")
    parser.add_argument("--brake", type=int, default=1 << 30, help="slow after so many batches")
    parser.add_argument("--brake-seconds", type=float, default=0.0, help="how slow, a batch")
    parser.add_argument("--settings", type=json.loads, default={})
    options = parser.parse_args()
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    kind = KINDS[options.kind]
    loaders = kind.make()
    evaluation = DataLoader(Samples(2 * BATCH), batch_size=BATCH, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    settings = holdfast.Settings(max_overhead=1.0, **options.settings)
    trace = Trace(options.trace, options.sleep, options.brake, options.brake_seconds)
    run = holdfast.Run(
        options.folder,
        settings=settings,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        seen="",
        **kind.state(loaders),
    )

    def evaluate(loop: str) -> None:
        with run.phase("eval"), torch.no_grad():
            for number, batch in enumerate(run.batches(evaluation)):
                model(batch[1])
                trace.note(run, loop, number, batch, model)

    with run:
        for _ in run.epochs(kind.epochs):
            torch.rand(1), random.random()  # a script's own draws at the top of an epoch
            for lap, loader in enumerate(loaders):
                sources = loader if isinstance(loader, tuple) else (loader,)
                for batch in run.batches(*sources, accumulate=kind.accumulate):
                    if isinstance(loader, tuple):
                        batch = [torch.cat(parts) for parts in zip(*batch, strict=True)]
                    noise = 1 + 0.01 * (random.random() + float(np.random.rand()))
                    (model(batch[1] * noise).square().mean()).backward()
                    if run.completes_step:
                        optimizer.step()
                        optimizer.zero_grad()
                    seen = f"{run.state['seen']}{run.epoch}{lap}{run.batch}{hash_of(batch[1])}"
                    run.update(seen=xxhash.xxh3_64_hexdigest(seen.encode()))
                    if kind.eval_every and (run.batch + 1) % kind.eval_every == 0:
                        evaluate(f"eval at {run.batch}")
                    trace.note(run, f"train {lap}", run.batch, batch, model)
                evaluate(f"eval {lap}")
                scheduler.step()
    result = {"state": hash_all(model, optimizer, scheduler), "seen": run.state["seen"]}
    part = options.result.with_suffix(".part")
    part.write_text(json.dumps(result))
    part.rename(options.result)


if __name__ == "__main__":
    main()
