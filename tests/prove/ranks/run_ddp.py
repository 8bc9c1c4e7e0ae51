"""Several ranks that train as one run: replicated weights, data shared out, dropout on each.

Under torchrun it is one of the ranks. By itself it starts as many as `--ranks` says, in the way
that `--start` names: `fork` or `spawn`.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast


def train(rank: int, size: int, store: str, epochs: int) -> None:
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
        for epoch in run.epochs(epochs):
            sampler.set_epoch(epoch)
            for x, y in run.batches(loader):
                loss = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
            with run.phase("eval"), torch.no_grad():
                run.log(check=float(layers(data.tensors[0]).mean()))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--start", default="spawn")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(-1, -1, "env://", options.epochs)
    else:
        more = (options.ranks, f"file://{tempfile.mkdtemp()}/store", options.epochs)
        mp.start_processes(train, more, nprocs=options.ranks, start_method=options.start)
