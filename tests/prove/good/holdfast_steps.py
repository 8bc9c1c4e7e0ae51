"""A holdfast run that counts steps."""

import hashlib

import torch
from torch import nn

import holdfast

torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)

state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
with holdfast.Run("runs/steps", **state) as run:
    for _ in run.steps(60):
        points = torch.randn(16, 6)
        loss = nn.functional.mse_loss(model(points), points.prod(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        run.log(loss=loss)

weights = nn.utils.parameters_to_vector(model.parameters()).detach()
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
