"""An optimizer that calls back for the loss several times a step."""

import os
from pathlib import Path

import torch
from torch import nn

STEPS, EVERY = 40, 5
CHECKPOINT = Path("newest.pt")

torch.set_num_threads(1)
torch.manual_seed(0)
points = torch.randn(200, 6)
values = points.cos().prod(dim=1, keepdim=True)
model = nn.Linear(6, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.05, max_iter=3)
chosen = torch.zeros(32, dtype=torch.long)
step = 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    step = saved["step"]


def closure():
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(points[chosen]), values[chosen])
    loss.backward()
    return loss


while step < STEPS:
    chosen = torch.randint(200, (32,))
    optimizer.step(closure)
    step += 1
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "random": torch.get_rng_state(), "step": step}, "newest.tmp")
        os.replace("newest.tmp", CHECKPOINT)
