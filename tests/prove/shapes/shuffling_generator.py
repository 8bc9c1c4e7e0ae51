"""As the imagenet example: saved after each epoch, without the generator that shuffles."""

import os
import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 6
torch.set_num_threads(1)
random.seed(1)
torch.manual_seed(1)
images = torch.randn(96, 6)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
start_epoch = 0
if Path("checkpoint.pth.tar").exists():
    checkpoint = torch.load("checkpoint.pth.tar")
    start_epoch = checkpoint["epoch"]
    model.load_state_dict(checkpoint["state_dict"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
loader = DataLoader(TensorDataset(images, images.argmax(1) % 3), batch_size=12, shuffle=True)


def train(epoch):
    model.train()
    for i, (batch, target) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % 4 == 0:
            print(epoch, i, loss.item())


for epoch in range(start_epoch, EPOCHS):
    train(epoch)
    scheduler.step()
    state = {"epoch": epoch + 1, "state_dict": model.state_dict()}
    state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(state, "checkpoint.tmp")
    os.replace("checkpoint.tmp", "checkpoint.pth.tar")
