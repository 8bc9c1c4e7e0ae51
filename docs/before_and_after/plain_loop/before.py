"""A plain loop: the weights are saved when it is over, and nothing before."""

import hashlib
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(2)
inputs = torch.rand(240, 1) * 6 - 3
targets = torch.sin(inputs) + 0.05 * torch.randn(240, 1)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=24, shuffle=True)
model = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)

for epoch in range(5):
    for x, y in loader:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        time.sleep(0.01)  # stands for a larger model
    scheduler.step()
    print(f"epoch {epoch}: loss {loss.item():.4f}")

torch.save(model.state_dict(), "model.pt")
weights = nn.utils.parameters_to_vector(model.parameters()).detach()
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
