"""Two ranks with a model in parts: what DCP stores of it, and a run that begins with that.

torchrun --nproc-per-node=2 adopt_ranks.py store FOLDER
torchrun --nproc-per-node=2 adopt_ranks.py resume FOLDER
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

import holdfast
from holdfast.torch.adapter import ADAPTER


def built(seed):
    """A model of which no dimension is even, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    for part in (model[0], model[2], model):
        fully_shard(part)
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.arange(10.0).reshape(2, 5)).pow(2).mean().backward()
    optimizer.step()


def whole(value):
    """All of a state on each rank, as bytes."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        found = value.full_tensor() if hasattr(value, "full_tensor") else value
        return (found.dtype, found.shape, bytes(ADAPTER.bytes_of(found)))
    return value


def store(folder):
    model, optimizer = built(0)
    for _ in range(3):
        train(model, optimizer)
    plain, named = get_state_dict(model, optimizer)
    dcp.save({"model": plain, "optimizer": named}, checkpoint_id=str(folder / "named"))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=str(folder / "numbered"))
    expected = whole({"model": model.state_dict(), "state": optimizer.state_dict()["state"]})
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected.pt")


def resume(folder):
    expected = torch.load(folder / "expected.pt", weights_only=False)
    for kind in ("named", "numbered"):
        model, optimizer = built(4)
        with holdfast.Run(folder / f"run-{kind}", model=model, optimizer=optimizer) as run:
            found = whole({"model": model.state_dict(), "state": optimizer.state_dict()["state"]})
            assert found == expected, kind
            for _ in run.steps(4):
                train(model, optimizer)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    {"store": store, "resume": resume}[sys.argv[1]](Path(sys.argv[2]))
    dist.barrier()
    dist.destroy_process_group()
