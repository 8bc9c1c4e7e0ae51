"""Several ranks that train as one run: replicated weights, data shared out, dropout on each."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 3


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
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
    main()
