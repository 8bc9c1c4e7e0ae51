"""Several ranks that train as one run: replicated weights, data shared out, dropout on each.

Under torchrun it is one of the ranks. By itself it starts as many as its first argument says,
in the way that the second one names: `fork` or `spawn`.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast

EPOCHS = 3


def train(rank: int = -1, size: int = -1, store: str = "env://") -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(96, 6), torch.randn(96, 1))
    layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 1))
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sampler = DistributedSampler(data, shuffle=True, seed=5)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    torch.manual_seed(100 + dist.get_rank())
    with holdfast.Run("run", model=model, optimizer=optimizer) as run:
        for epoch in run.epochs(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y in run.batches(loader):
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        train()
    else:
        size, method = int(sys.argv[1]), sys.argv[2]
        store = f"file://{tempfile.mkdtemp()}/store"
        mp.start_processes(train, (size, store), nprocs=size, start_method=method)
