"""Data parallel: DDP on as many ranks as you like, which stop, save and go on as one run.

    torchrun --standalone --nproc-per-node=2 examples/ddp.py
    python examples/ddp.py

Press Ctrl-C, or kill one rank, or torchrun itself, with -9 from another terminal (`holdfast status
runs` shows the pids), and start the same command again: all ranks continue after the same step. The
last line has a hash of the weights, the same however often you interrupt it. With another number
of ranks it goes on too, and no sample of the epoch comes twice or not at all; only the sums of the
gradients, and with them the hash, are then others.
"""

import argparse
import hashlib
import os

import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast.torch


def make_data(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of three spirals that wind around each other, with some noise."""
    arm = torch.randint(3, (size,))
    way = torch.rand(size)
    angle = 5 * way + arm * (2 * torch.pi / 3) + torch.randn(size) * 0.15
    return torch.stack([way * angle.cos(), way * angle.sin()], dim=1), arm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/ddp", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--size", type=int, default=6000, help="points in an epoch")
    options = parser.parse_args()

    # A GPU gives the same bits twice only if it is asked to; cuBLAS reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the other ranks want a core too
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    holdfast.torch.init_process_group()  # nccl or gloo; says what is wrong, and does not hang
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same data and the same first weights on all ranks
    data = TensorDataset(*make_data(options.size))
    points, labels = (part.to(device) for part in make_data(3000))
    loader = DataLoader(data, batch_size=max(1, 64 // ranks), sampler=DistributedSampler(data))
    net = nn.Sequential(
        *(nn.Linear(2, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 3)),
    ).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
    torch.manual_seed(rank)  # but each drops out its own

    @torch.no_grad()
    def count_right(share: slice) -> torch.Tensor:
        net.eval()
        right = (net(points[share]).argmax(1) == labels[share]).sum()
        net.train()
        return right

    state = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
    with holdfast.Run(options.folder, **state) as run:
        for _ in run.epochs(options.epochs):
            for inputs, targets in run.batches(loader):  # set_epoch is called for you
                loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
            scheduler.step()
            with run.phase("eval"):
                right = count_right(slice(rank, None, ranks))  # each rank its share of the points
                dist.all_reduce(right)
                run.log(accuracy=right.item() / len(points))

    if rank == 0:
        accuracy = count_right(slice(None)).item() / len(points)
        weights = nn.utils.parameters_to_vector(net.parameters()).detach().cpu()
        digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
        print(f"accuracy {accuracy:.1%} on {device}, {ranks} rank(s), weights {digest}")
    del model  # with gloo, torch can hang if it goes after the group that it belongs to
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
