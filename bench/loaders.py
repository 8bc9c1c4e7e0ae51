"""What `run.batches` costs, compared with the plain loader and torchdata's StatefulDataLoader.

    python -m bench.loaders [--quick] [--rounds 60]

One interleaved run: in each round the same pass over the same data is made by the plain
loader, by `run.batches` around it and by the peer, in an order that is drawn. Printed are
medians of seconds per pass, the spread, and the ratio to the plain loader: the median of
the ratios within a round, since the machine's speed drifts from round to round, with the range
in which that median lies with 95% (from the ranks of the ratios). The run takes no snapshots
here: what they cost is a setting, 1% by default, and `python -m bench saving` measures it. The
peer keeps a position in the data; it does not make the augmentation in its workers the same after
a restart, which ours does.
What this does not show: real image decoding, GPUs, network file systems, other peers.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

import holdfast
from bench.machine import machine

TARGET = 1.02


class Images(Dataset):
    """Small images in memory, each with new noise."""

    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 3, 32, 32)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.images[index] + 0.1 * torch.randn(3, 32, 32)


class Training:
    """A step of a small network, or nothing at all."""

    def __init__(self, width: int) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Flatten(),
            torch.nn.Linear(3 * 32 * 32, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, 10),
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, batch: torch.Tensor) -> None:
        loss = self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@dataclass
class Case:
    """One kind of loader, and the seconds of a pass by each way."""

    name: str
    options: dict[str, Any]
    trains: bool
    seconds: dict[str, list[float]] = field(
        default_factory=lambda: {"plain": [], "holdfast": [], "torchdata": []}
    )

    def ratio(self, way: str) -> float:
        return statistics.median(self._ratios(way))

    def range_of_ratio(self, way: str) -> tuple[float, float]:
        """Where the median lies with 95%, whatever the distribution is."""
        ratios = sorted(self._ratios(way))
        reach = 0.98 * len(ratios) ** 0.5
        low, high = len(ratios) / 2 - reach, len(ratios) / 2 + reach
        return ratios[max(0, round(low))], ratios[min(len(ratios) - 1, round(high))]

    def _ratios(self, way: str) -> list[float]:
        pairs = zip(self.seconds[way], self.seconds["plain"], strict=True)
        return [ours / plain for ours, plain in pairs]


def cases() -> list[Case]:
    shuffled = {"batch_size": 64, "shuffle": True}
    workers = {**shuffled, "num_workers": 2}
    return [
        Case("in process, batches only", shuffled, trains=False),
        Case("in process, with training", shuffled, trains=True),
        Case("2 workers, batches only", workers, trains=False),
        Case("2 workers, with training", workers, trains=True),
        Case("2 persistent workers", {**workers, "persistent_workers": True}, trains=True),
    ]


def measure(case: Case, images: Images, rounds: int, folder: Path) -> None:
    torch.manual_seed(0)
    training = Training(512)
    loader = DataLoader(images, **case.options)
    peer = StatefulDataLoader(images, **case.options)
    work: Callable[[torch.Tensor], None] = training.step if case.trains else lambda _: None
    with holdfast.Run(
        folder,
        settings=holdfast.Settings(max_overhead=0, checkpoint_every="10h"),
        model=training.model,
        optimizer=training.optimizer,
    ) as run:
        ways: list[tuple[str, Callable[[], Iterable[torch.Tensor]]]] = [
            ("plain", lambda: loader),
            ("holdfast", lambda: run.batches(loader)),
            ("torchdata", lambda: peer),
        ]
        for number in run.epochs(rounds + 1):
            # Drawn, since a pass leaves its traces in the memory that the next one takes.
            for way, batches in random.Random(number).sample(ways, len(ways)):
                began = time.perf_counter()
                for batch in batches():
                    work(batch)
                if number:  # the first pass warms up
                    case.seconds[way].append(time.perf_counter() - began)


def show(case: Case) -> bool:
    met = case.ratio("holdfast") <= TARGET
    print(f"{case.name:28} {case.ratio('holdfast'):6.3f} x   target {TARGET} x   ", end="")
    low, high = case.range_of_ratio("holdfast")
    print(f"{'ok' if met else 'MISSED'} ({low:.3f} to {high:.3f})   ", end="")
    print(f"torchdata {case.ratio('torchdata'):.3f} x")
    for way, seconds in case.seconds.items():
        low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
        print(f"{'':28} {way:10} {middle * 1e3:7.0f} ms ({low * 1e3:.0f} to {high * 1e3:.0f})")
    return met


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--only", default="", help="cases with this in their names")
    parser.add_argument("--out", type=Path, help="keep the figures as JSON here")
    options = parser.parse_args()
    rounds, count = 5 if options.quick else options.rounds, 6_400
    images = Images(count)
    torch.set_num_threads(1)  # else the training takes the cores that the workers need
    print(f"{machine()}\n{count // 64} batches of 64 images a pass, {rounds} rounds\n")
    found = [case for case in cases() if options.only in case.name]
    met = True
    for number, case in enumerate(found):
        folder = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
        try:
            measure(case, images, rounds, folder / str(number))
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        met = show(case) and met
    if options.out is not None:
        record = {
            "machine": machine(),
            "batches": count // 64,
            "cases": [
                {
                    "name": case.name,
                    "ratio": case.ratio("holdfast"),
                    "ratio_range": case.range_of_ratio("holdfast"),
                    "torchdata_ratio": case.ratio("torchdata"),
                    "seconds": case.seconds,
                }
                for case in found
            ],
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
