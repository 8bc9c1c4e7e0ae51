"""Elastic data-parallel training: torchrun starts it again, and each start loads the snapshot.

torchrun --standalone --nproc-per-node=2 --max-restarts=3 before.py
"""

import hashlib
import os
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, model, loader, optimizer, scheduler, save_every, snapshot="snapshot.pt"):
        self.net, self.model, self.loader = model, DistributedDataParallel(model), loader
        self.optimizer, self.scheduler = optimizer, scheduler
        self.save_every, self.snapshot = save_every, Path(snapshot)
        self.epochs_run = 0
        if self.snapshot.exists():
            saved = torch.load(self.snapshot)
            self.net.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
            self.epochs_run = saved["epochs_run"]

    def train(self, epochs):
        for epoch in range(self.epochs_run, epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
                time.sleep(0.01)  # stands for a larger model
            self.scheduler.step()
            if int(os.environ["RANK"]) == 0 and (epoch + 1) % self.save_every == 0:
                self.save(epoch)

    def save(self, epoch):
        saved = {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(saved | {"epochs_run": epoch}, self.snapshot)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(6)
    inputs = torch.randn(192, 8)
    data = TensorDataset(inputs, inputs[:, :2].prod(1, keepdim=True))
    batch_size = 32 // dist.get_world_size()
    loader = DataLoader(data, batch_size=batch_size, sampler=DistributedSampler(data, seed=6))
    model = nn.Sequential(nn.Linear(8, 32), nn.SiLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    Trainer(model, loader, optimizer, scheduler, save_every=2).train(epochs=8)
    if dist.get_rank() == 0:
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
