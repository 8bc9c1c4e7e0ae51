"""Two phases with an optimizer each: the first one’s state is rightly left behind."""

import os
from pathlib import Path

import torch
from torch import nn

STEPS, EVERY = 20, 5
CHECKPOINT = Path("newest.pt")

torch.set_num_threads(1)
torch.manual_seed(0)
points = torch.randn(200, 6)
values = points.cos().prod(dim=1, keepdim=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
saved = torch.load(CHECKPOINT) if CHECKPOINT.exists() else None


def train(phase, rate):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    start = 0
    if saved and saved["phase"] == phase:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        start = saved["step"]
    for step in range(start, STEPS):
        chosen = torch.randint(200, (16,))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(points[chosen]), values[chosen]).backward()
        optimizer.step()
        if (step + 1) % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state.update(phase=phase, step=step + 1, random=torch.get_rng_state())
            torch.save(state, "newest.tmp")
            os.replace("newest.tmp", CHECKPOINT)


if not saved or saved["phase"] == "first":
    train("first", rate=0.01)
train("second", rate=0.001)
