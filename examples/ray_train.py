"""Ray Train: two workers of a Ray, which starts them again when one is lost, to the same bits.

    python examples/ray_train.py
    torchrun --standalone --nproc-per-node=2 examples/ray_train.py --workers 0   # without a Ray

Kill a worker with -9 from another terminal (`holdfast status runs` shows the pids): Ray starts all
of them again, and they continue after the newest step that all had. `holdfast stop runs/ray` ends
it, and so does Ctrl-C; start the same command again, and it goes on. The last line has a hash of
the weights, the same however often you interrupt it.
"""

import argparse
import hashlib
import os
from pathlib import Path

import ray
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast.ray


def make_data(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of three spirals that wind around each other, with some noise."""
    arm = torch.randint(3, (size,))
    way = torch.rand(size)
    angle = 5 * way + arm * (2 * torch.pi / 3) + torch.randn(size) * 0.15
    return torch.stack([way * angle.cos(), way * angle.sin()], dim=1), arm


def train_loop(config: dict) -> str:
    """What each worker does; Ray has made the process group. The result is that of rank 0."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    device, rank, ranks = get_device(), dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same data and the same first weights on all ranks
    data = TensorDataset(*make_data(config["size"]))
    points, labels = (part.to(device) for part in make_data(3000))
    loader = DataLoader(data, batch_size=max(1, 64 // ranks), sampler=DistributedSampler(data))
    net = nn.Sequential(
        *(nn.Linear(2, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 3)),
    ).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(rank)  # but each drops out its own

    with holdfast.Run(config["folder"], model=net, optimizer=optimizer) as run:
        for _ in run.epochs(config["epochs"]):
            for inputs, targets in run.batches(loader):  # set_epoch is called for you
                loss = F.cross_entropy(model(inputs.to(device)), targets.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)

    with torch.no_grad():
        accuracy = (net.eval()(points).argmax(1) == labels).float().mean().item()
    weights = nn.utils.parameters_to_vector(net.parameters()).detach().cpu()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    return f"accuracy {accuracy:.1%} on {device.type}, {ranks} rank(s), weights {digest}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/ray", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--size", type=int, default=6000, help="points in an epoch")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    if options.workers and "RAY_ADDRESS" not in os.environ:  # a small Ray of our own
        ray.init(num_cpus=options.workers, object_store_memory=10**8, include_dashboard=False)
    has_gpus = torch.cuda.is_available()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config=vars(options),
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=has_gpus),
        run_config=RunConfig(
            storage_path=f"{Path(options.folder).absolute()}_of_ray",  # nothing of the run
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = holdfast.ray.fit(trainer)  # trainer.fit(), to which a stop is no failure
    print(result.return_value)


if __name__ == "__main__":
    main()
