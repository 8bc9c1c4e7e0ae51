"""Forgotten: that a kill can come between the weights’ file and the optimizer’s."""

import os
from pathlib import Path

import torch
from torch import nn

STEPS, EVERY = 45, 5
WEIGHTS, REST = Path("model.pt"), Path("rest.pt")

torch.set_num_threads(1)
torch.manual_seed(0)
points = torch.randn(200, 6)
values = points.cos().prod(dim=1, keepdim=True)


def save(state, path):
    torch.save(state, "new.tmp")
    os.replace("new.tmp", path)


model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0
if WEIGHTS.exists() and REST.exists():
    model.load_state_dict(torch.load(WEIGHTS))
    saved = torch.load(REST)
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    step = saved["step"]
while step < STEPS:
    chosen = torch.randint(200, (16,))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(points[chosen]), values[chosen]).backward()
    optimizer.step()
    step += 1
    if step % EVERY == 0:
        save(model.state_dict(), WEIGHTS)
        rest = {"optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        save({**rest, "step": step}, REST)
