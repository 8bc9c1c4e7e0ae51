"""Data-parallel training in a run, which all ranks leave at one step.

torchrun --standalone --nproc-per-node=2 after.py
"""

import hashlib
import time

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast

EPOCHS = 5


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    inputs = torch.randn(320, 16)
    labels = inputs[:, :5].argmax(1)
    data = TensorDataset(inputs, labels)
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=32 // ranks, sampler=sampler)
    net = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 5))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)
    parts = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    torch.manual_seed(100 + rank)  # each rank drops out its own

    with holdfast.Run("run", **parts) as run:
        for _ in run.epochs(EPOCHS):
            for x, y in run.batches(loader):  # calls set_epoch
                loss = F.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                time.sleep(0.01)  # stands for a larger model
            scheduler.step()

    if rank == 0:
        weights = nn.utils.parameters_to_vector(model.parameters()).detach()
        print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
