"""Ctrl-C ends the step that is being made, and the next start goes on with the next batch."""

import hashlib
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast

EPOCHS = 6

torch.set_num_threads(1)
torch.manual_seed(1)
inputs = torch.randn(256, 12)
labels = (inputs[:, :4].sum(1) > 0).long()
loader = DataLoader(TensorDataset(inputs, labels), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)

with holdfast.Run("run", model=model, optimizer=optimizer, scheduler=scheduler) as run:
    for _ in run.epochs(EPOCHS):
        for x, y in run.batches(loader):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            time.sleep(0.01)  # stands for a larger model
        scheduler.step()

weights = nn.utils.parameters_to_vector(model.parameters()).detach()
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
