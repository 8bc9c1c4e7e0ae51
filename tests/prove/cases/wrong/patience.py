"""Forgotten: for how long the loss has not fallen, so that a resumed run stops later."""

import os
from pathlib import Path

import torch
from torch import nn

STEPS, EVERY = 80, 5
CHECKPOINT = Path("newest.pt")

torch.set_num_threads(1)
torch.manual_seed(0)
points = torch.randn(200, 6)
values = points.cos().prod(dim=1, keepdim=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
lowest, in_vain, step = float("inf"), 0, 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    step = saved["step"]
    lowest = saved["lowest"]
while step < STEPS:
    chosen = torch.randint(200, (16,))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(points[chosen]), values[chosen])
    loss.backward()
    optimizer.step()
    step += 1
    if step % 2 == 0:
        in_vain = 0 if loss.item() < lowest else in_vain + 1
        lowest = min(lowest, loss.item())
        if in_vain >= 5:
            break
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state.update(random=torch.get_rng_state(), step=step, lowest=lowest)
        torch.save(state, "newest.tmp")
        os.replace("newest.tmp", CHECKPOINT)
