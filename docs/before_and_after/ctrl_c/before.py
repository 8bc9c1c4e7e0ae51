"""Ctrl-C is caught around the training, and what is there by then is saved."""

import hashlib
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 6
CHECKPOINT = Path("interrupted.pt")

torch.set_num_threads(1)
torch.manual_seed(1)
inputs = torch.randn(256, 12)
labels = (inputs[:, :4].sum(1) > 0).long()
loader = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)

first = 0
if CHECKPOINT.exists():
    checkpoint = torch.load(CHECKPOINT)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    first = checkpoint["epoch"]

try:
    for epoch in range(first, EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.01)  # stands for a larger model
        scheduler.step()
        print(f"epoch {epoch}: loss {loss.item():.4f}")
except KeyboardInterrupt:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, CHECKPOINT)
    sys.exit(f"interrupted in epoch {epoch}, saved to {CHECKPOINT}")

weights = nn.utils.parameters_to_vector(model.parameters()).detach()
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
