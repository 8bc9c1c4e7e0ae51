"""The plain loop in a run: interrupted anywhere, it goes on from there."""

import hashlib
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

torch.set_num_threads(1)
torch.manual_seed(2)
inputs = torch.rand(240, 1) * 6 - 3
targets = torch.sin(inputs) + 0.05 * torch.randn(240, 1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=24, shuffle=True)
model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

with holdfast.Run("run", model=model, optimizer=optimizer, scheduler=scheduler) as run:
    for _ in run.epochs(5):
        for x, y in run.batches(loader):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            time.sleep(0.01)  # stands for a larger model
        scheduler.step()

torch.save(model.state_dict(), "model.pt")
weights = nn.utils.parameters_to_vector(model.parameters()).detach()
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
