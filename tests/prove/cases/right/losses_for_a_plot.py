"""An array of losses is only written to: a resume begins it anew, and no step notices."""

import os
from pathlib import Path

import numpy as np
import torch
from torch import nn

STEPS, EVERY = 40, 5
CHECKPOINT = Path("newest.pt")

torch.set_num_threads(1)
torch.manual_seed(0)
points = torch.randn(200, 6)
values = points.cos().prod(dim=1, keepdim=True)
model = nn.Linear(6, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = np.zeros(STEPS)
step = 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    step = saved["step"]
while step < STEPS:
    chosen = torch.randint(200, (16,))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(points[chosen]), values[chosen])
    loss.backward()
    optimizer.step()
    losses[step] = loss.item()
    step += 1
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "random": torch.get_rng_state(), "step": step}, "newest.tmp")
        os.replace("newest.tmp", CHECKPOINT)
