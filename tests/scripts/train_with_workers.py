"""A training from a DataLoader with two workers; prints `ready STEP`, and a line for each step."""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast


class Samples(TensorDataset):
    """All of them good, unless it is asked for a bad one."""

    def __getitem__(self, index):
        if index == 20 and "--bad-sample" in sys.argv:
            raise ValueError("on purpose")
        return super().__getitem__(index)


if __name__ == "__main__":
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 1)
    loader = DataLoader(Samples(torch.randn(4000, 4)), batch_size=2, num_workers=2)
    with holdfast.Run(sys.argv[1], model=model) as run:
        print("ready", run.step, flush=True)
        for _ in run.epochs(100):
            for (batch,) in run.batches(loader):
                model(batch).sum().backward()
                print("at", run.step, flush=True)
                time.sleep(0.005)
