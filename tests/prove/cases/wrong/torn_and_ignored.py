"""Forgotten: that a save can be cut off; what cannot be read is silently taken for none."""

from pathlib import Path

import torch
from torch import nn

STEPS, EVERY = 45, 5
CHECKPOINT = Path("newest.pt")

torch.set_num_threads(1)
torch.manual_seed(0)
points = torch.randn(200, 6)
values = points.cos().prod(dim=1, keepdim=True)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0
try:
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    step = saved["step"]
except Exception:  # noqa: BLE001 - the fault
    print("no checkpoint, starting from scratch")
while step < STEPS:
    chosen = torch.randint(200, (16,))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(points[chosen]), values[chosen]).backward()
    optimizer.step()
    step += 1
    if step % EVERY == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "random": torch.get_rng_state(), "step": step}, CHECKPOINT)
