"""Elastic training in a run: torchrun starts it again, and it goes on where it was.

torchrun --standalone --nproc-per-node=2 --max-restarts=3 after.py
"""

import hashlib
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast


class Trainer:
    def __init__(self, model, loader, optimizer, scheduler, snapshots="run"):
        self.net, self.model, self.loader = model, DistributedDataParallel(model), loader
        self.optimizer, self.scheduler = optimizer, scheduler
        self.snapshots = snapshots

    def train(self, epochs):
        state = {"model": self.net, "optimizer": self.optimizer, "scheduler": self.scheduler}
        with holdfast.Run(self.snapshots, **state) as run:
            for _ in run.epochs(epochs):
                for x, y in run.batches(self.loader):  # calls set_epoch
                    self.optimizer.zero_grad()
                    nn.functional.mse_loss(self.model(x), y).backward()
                    self.optimizer.step()
                    time.sleep(0.01)  # stands for a larger model
                self.scheduler.step()


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
    Trainer(model, loader, optimizer, scheduler).train(epochs=8)
    if dist.get_rank() == 0:
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
