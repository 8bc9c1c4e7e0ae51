"""Forgotten: that the epoch in the checkpoint is done; a resume makes it once more."""

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 5
CHECKPOINT = Path("newest.pt")

torch.set_num_threads(1)
torch.manual_seed(0)
points = torch.randn(200, 6)
values = points.cos().prod(dim=1, keepdim=True)
loader = DataLoader(TensorDataset(points[:80], values[:80]), batch_size=8, shuffle=True)
model = nn.Linear(6, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
first = 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    first = saved["epoch"]
for epoch in range(first, EPOCHS):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "random": torch.get_rng_state(), "epoch": epoch}, "newest.tmp")
    os.replace("newest.tmp", CHECKPOINT)
