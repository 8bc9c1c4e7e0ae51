"""A second loader reads the dataset of the training, between two epochs."""

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 6
CHECKPOINT = Path("newest.pt")

torch.set_num_threads(1)
torch.manual_seed(0)
points = torch.randn(200, 6)
values = points.cos().prod(dim=1, keepdim=True)
dataset = TensorDataset(points, values)
loader = DataLoader(dataset, batch_size=25, shuffle=True)
in_order = DataLoader(dataset, batch_size=100)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
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
    with torch.no_grad():
        print(epoch, sum(nn.functional.mse_loss(model(x), y).item() for x, y in in_order))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "random": torch.get_rng_state(), "epoch": epoch + 1}, "newest.tmp")
    os.replace("newest.tmp", CHECKPOINT)
