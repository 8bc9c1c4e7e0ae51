"""Forgotten: the averaged model is not among the keywords of the run."""

import hashlib

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast


def digest_of(module):
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    return hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:16]


torch.set_num_threads(1)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, 1))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.95))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

with holdfast.Run("runs/averaged", model=model, optimizer=optimizer) as run:
    for _ in run.steps(50):
        points = torch.randn(16, 6)
        loss = nn.functional.mse_loss(model(points), points.prod(dim=1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)

torch.save(average.module.state_dict(), "averaged.pt")
print("ema", digest_of(average), "weights", digest_of(model))
