"""Accelerate: gradients of four batches in a step, on one process or several, as one run.

    python examples/accelerate_loop.py
    torchrun --standalone --nproc-per-node=2 examples/accelerate_loop.py

Press Ctrl-C, or kill a process with -9 from another terminal (`holdfast status runs` shows its
pid), and start the same command again: it continues after the last step, in the middle of the
epoch, with the batches that Accelerate would have given each process. However often you interrupt
it, it ends with the same hash of the weights.
"""

import argparse
import hashlib

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def make_data(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of three spirals that wind around each other, with some noise."""
    arm = torch.randint(3, (size,))
    way = torch.rand(size)
    angle = 5 * way + arm * (2 * torch.pi / 3) + torch.randn(size) * 0.15
    return torch.stack([way * angle.cos(), way * angle.sin()], dim=1), arm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/accelerate", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=int, default=6000, help="points in an epoch")
    options = parser.parse_args()

    torch.use_deterministic_algorithms(True)
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=not torch.cuda.is_available())
    set_seed(0)  # the same data and the same first weights on all ranks
    loader = DataLoader(TensorDataset(*make_data(options.size)), batch_size=16, shuffle=True)
    points, labels = (part.to(accelerator.device) for part in make_data(2000))
    model = nn.Sequential(
        *(nn.Linear(2, 64), nn.ReLU(), nn.Dropout(0.1)),
        *(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2000)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    accuracy = 0.0
    with holdfast.Run(options.folder, model=model, optimizer=optimizer, scheduler=scheduler) as run:
        for _ in run.epochs(options.epochs):
            # As many as the accelerator makes one step of: a run is saved behind a step only.
            for batch, truth in run.batches(loader, accumulate=4):
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(batch), truth)
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                run.log(loss=loss)
            with run.phase("eval"), torch.no_grad():
                bare = accelerator.unwrap_model(model).eval()
                accuracy = (bare(points).argmax(1) == labels).float().mean().item()
                run.log(accuracy=accuracy)
            model.train()

    if accelerator.is_main_process:
        weights = accelerator.unwrap_model(model).state_dict().values()
        data = b"".join(weight.cpu().numpy().tobytes() for weight in weights)
        digest = hashlib.sha256(data).hexdigest()[:16]
        print(f"{run.step} steps, accuracy {accuracy:.1%}, weights {digest}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
