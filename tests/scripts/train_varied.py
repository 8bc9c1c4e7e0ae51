"""A short training whose state has one of everything that can be stored, to be exported."""

from __future__ import annotations

import sys
from collections import OrderedDict

import numpy as np
import torch

import holdfast


class Tied(torch.nn.Module):
    """The weight of the last layer is that of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 4)
        self.head.weight = self.embed.weight


def build() -> dict[str, object]:
    torch.manual_seed(3)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "ema": {"again": model.embed.weight.detach()},
        "tensors": {
            "bf16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
            "f8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn),
            "u16": torch.tensor([1, 65535], dtype=torch.uint16),
            "c64": torch.tensor([1 + 2j]),
            "c128": torch.tensor([1 + 2j], dtype=torch.complex128),
            "turned": torch.arange(6.0).reshape(2, 3).t(),
            "empty": torch.empty(0, 3),
            "number": torch.tensor(7),
        },
        "arrays": {
            "f4": np.arange(3, dtype=np.float32),
            "big endian": np.arange(3, dtype=">i4"),
            "words": np.array(["ab", "c"]),
            "scalar": np.float32(1.5),
            "u1": np.arange(3, dtype=np.uint8),
        },
        "generator": torch.Generator().manual_seed(5),
        "plain": {
            "none": None,
            "nan": float("nan"),
            "big": 1 << 1100,
            "tuple": (1, (2.5, "x")),
            "set": {1, 2},
            "frozen": frozenset({"a"}),
            "bytes": b"short",
            "long bytes": b"x" * 3000,
            "bytearray": bytearray(b"y" * 2000),
            "complex": 1 + 2j,
            "dtype": torch.bfloat16,
            "device": torch.device("cpu"),
            "keys": {0: "zero", (1, 2): torch.ones(2)},
            "ordered": OrderedDict(a=1),
            "a.b": torch.zeros(1),
            "a": {"b": torch.ones(1)},
        },
        "whole": torch.arange(4.0),
    }


def main() -> None:
    state = build()
    model, optimizer, scheduler = state["model"], state["optimizer"], state["scheduler"]
    with holdfast.Run(sys.argv[1], **state) as run:
        for _ in run.steps(2):
            optimizer.zero_grad()
            model.head(model.embed(torch.ones(4))).square().sum().backward()
            optimizer.step()
            scheduler.step()


if __name__ == "__main__":
    main()
