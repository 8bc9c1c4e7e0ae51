"""One of two ranks that train by DDP under `Join`: rank 0 has two batches more than rank 1."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import holdfast

_BATCHES = 12


def main(plan: dict) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{plan['store']}", rank=plan["rank"], world_size=plan["world"]
    )
    torch.manual_seed(plan["rank"])
    net = torch.nn.Linear(4, 1)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    count = _BATCHES + 2 * (plan["rank"] == 0)
    loader = DataLoader(torch.randn(count * 4, 4), batch_size=4)
    with holdfast.Run(plan["folder"], model=net, optimizer=optimizer) as run:
        for _ in run.epochs(plan["total"]):
            with Join([model]):
                for inputs in run.batches(loader):
                    loss = model(inputs).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
