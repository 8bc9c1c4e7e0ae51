"""PyTorch: a loop of its own, a shuffling loader, Adam, dropout and a scheduler."""

from __future__ import annotations

import task
import torch
from torch.nn import functional as F

import holdfast

torch.set_num_threads(1)
torch.manual_seed(3)
inputs, targets = torch.from_numpy(task.INPUTS), torch.from_numpy(task.TARGETS)
data = torch.utils.data.TensorDataset(inputs, targets)
loader = torch.utils.data.DataLoader(data, batch_size=task.BATCH, shuffle=True)
model = torch.nn.Sequential(
    torch.nn.Linear(6, task.HIDDEN),
    torch.nn.Tanh(),
    torch.nn.Dropout(task.DROPPED),
    torch.nn.Linear(task.HIDDEN, 1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=task.RATE)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
with holdfast.Run(task.FOLDER, settings=task.SETTINGS, **state) as run:
    for _ in run.epochs(task.EPOCHS):
        for batch, wanted in run.batches(loader):
            loss = F.mse_loss(model(batch), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        scheduler.step()
        with run.phase("eval"), torch.no_grad():
            model.eval()
            run.log(val_loss=F.mse_loss(model(inputs), targets))
            model.train()
