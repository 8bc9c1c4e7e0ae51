"""A signal is answered where a step is complete, and a handler of one's own is not needed."""

import hashlib
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast

STEPS = 60

torch.set_num_threads(1)
torch.manual_seed(3)
images = torch.randn(160, 1, 8, 8)
labels = (images[:, 0, :4].mean((1, 2)) > images[:, 0, 4:].mean((1, 2))).long()
loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
model = nn.Sequential(
    *(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
    *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(96, 2)),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=STEPS)

with holdfast.Run("run", model=model, optimizer=optimizer, scheduler=scheduler) as run:
    for _ in run.epochs(STEPS // len(loader)):
        for x, y in run.batches(loader):
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            run.log(loss=loss)
            time.sleep(0.005)  # stands for a larger model

weights = nn.utils.parameters_to_vector(model.parameters()).detach()
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
