"""Not repeatable: nothing is seeded. Its checkpoints are right."""

import hashlib
import os
from pathlib import Path

import torch
from torch import nn

torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step = 0
if Path("unseeded.pt").exists():
    state = torch.load("unseeded.pt")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    step = state["step"]
while step < 40:
    points = torch.randn(16, 6)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(points), points.prod(dim=1, keepdim=True)).backward()
    optimizer.step()
    step += 1
    if step % 5 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"random": torch.get_rng_state(), "step": step}
        torch.save(state, "unseeded.tmp")
        os.replace("unseeded.tmp", "unseeded.pt")

weights = nn.utils.parameters_to_vector(model.parameters()).detach()
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
