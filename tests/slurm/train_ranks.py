"""A small training of several ranks: train_ranks.py RUN STEPS SECONDS; its end goes to RUN.pt."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import holdfast
import holdfast.torch

folder, steps, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
torch.manual_seed(0)
holdfast.torch.init_process_group()
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
torch.manual_seed(rank)  # each rank has data of its own
with holdfast.Run(folder, model=model, optimizer=optimizer) as run:
    print(f"rank {rank}: attempt {run.attempt} begins at step {run.step}", flush=True)
    for _ in run.steps(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        time.sleep(seconds)
if rank == 0:
    torch.save(model.module.state_dict(), f"{folder}.pt")
dist.destroy_process_group()
print(f"rank {rank}: trained", flush=True)
