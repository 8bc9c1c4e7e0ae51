"""Two ranks that resume rightly: rank 0 saves between steps, all load, the data knows its place."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, EVERY = 3, 4


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(96, 6), torch.randn(96, 1))
    sampler = DistributedSampler(data, shuffle=True, seed=5)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    epoch, used = 0, 0
    if Path("ddp.pt").exists():
        stored = torch.load("ddp.pt")
        model.module.load_state_dict(stored["model"])
        optimizer.load_state_dict(stored["optimizer"])
        epoch, used = stored["epoch"], stored["used"]
    while epoch < EPOCHS:
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader):
            if number < used:
                continue
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            used = number + 1
            if used % EVERY == 0 and rank == 0:
                content = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(content | {"epoch": epoch, "used": used}, "ddp.tmp")
                os.replace("ddp.tmp", "ddp.pt")
        epoch, used = epoch + 1, 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
