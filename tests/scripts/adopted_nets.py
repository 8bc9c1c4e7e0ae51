"""The objects that the cases of torch and of what is built on it train."""

from __future__ import annotations

import torch
from torch import nn

from holdfast.torch.adapter import ADAPTER

X = torch.arange(48.0).reshape(12, 4) / 48


class Net(nn.Module):
    """With buffers, tied weights, an empty tensor, and several types."""

    def __init__(self, width=4, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, width, bias=False)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.out.weight
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("bf16", torch.randn(3).bfloat16())
        self.register_buffer("turns", torch.randn(2, dtype=torch.complex64))
        self.register_buffer("count", torch.tensor(seed))

    def forward(self, x):
        return self.tied(self.out(self.norm(self.inner(x)))).pow(2).mean()


def objects(width=4, seed=0):
    model = Net(width, seed)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(state, steps):
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](X).backward()
        state["optimizer"].step()
        if "scheduler" in state:
            state["scheduler"].step()


def same(one, other, path="state"):
    """Whether two states are one, value by value and type by type."""
    if hasattr(one, "state_dict"):
        one, other = one.state_dict(), other.state_dict()
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert bytes(ADAPTER.bytes_of(one)) == bytes(ADAPTER.bytes_of(other)), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), (path, one.keys() ^ other.keys())
        for key, item in one.items():
            same(item, other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert (type(one), len(one)) == (type(other), len(other)), path
        for at, item in enumerate(one):
            same(item, other[at], f"{path}.{at}")
    else:
        assert one == other, (path, one, other)


def states(state):
    return {name: value.state_dict() for name, value in state.items()}
