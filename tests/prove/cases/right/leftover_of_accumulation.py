"""Ten batches in groups of four: gradients of the last two are thrown away, on purpose."""

import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 20
CHECKPOINT = Path("newest.pt")

torch.set_num_threads(1)
torch.manual_seed(0)
points = torch.randn(200, 6)
values = points.cos().prod(dim=1, keepdim=True)
loader = DataLoader(TensorDataset(points, values), batch_size=20, shuffle=True)
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
    optimizer.zero_grad()
    for batch, (x, y) in enumerate(loader):
        (nn.functional.mse_loss(model(x), y) / 4).backward()
        if (batch + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**state, "random": torch.get_rng_state(), "epoch": epoch + 1}, "newest.tmp")
    os.replace("newest.tmp", CHECKPOINT)
