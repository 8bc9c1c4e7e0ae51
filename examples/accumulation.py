"""Gradient accumulation: four small batches make one step of the optimizer.

    python examples/accumulation.py

Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status runs` shows its pid), and
start the same command again: it continues after the last batch of a whole step, never with a part
of a gradient. An epoch here has 61 batches, so its last step has only one: `run.completes_step`
knows. However often you interrupt it, it ends with the same hash of the weights.
"""

import argparse
import hashlib
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast

ACCUMULATE, BATCH, LENGTH = 4, 16, 64


def make_waves(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Waves with noise, and the same waves without."""
    time = torch.linspace(0, 2 * math.pi, LENGTH)
    speed, shift = torch.rand(2, count, 2, 1) * 5 + 1
    clean = torch.sin(speed * time + shift).sum(dim=1, keepdim=True)
    return clean + torch.randn(count, 1, LENGTH) * 0.7, clean


def make_model(width: int = 24) -> nn.Module:
    inner = [
        part
        for gap in (1, 2, 4)
        for part in (
            nn.Conv1d(width, width, 5, padding=2 * gap, dilation=gap),
            nn.GroupNorm(4, width),  # a batch is too small for BatchNorm
            nn.GELU(),
        )
    ]
    first, last = nn.Conv1d(1, width, 5, padding=2), nn.Conv1d(width, 1, 5, padding=2)
    return nn.Sequential(first, nn.GELU(), *inner, nn.Dropout(0.05), last)


@torch.no_grad()
def evaluate(model: nn.Module, noisy: torch.Tensor, clean: torch.Tensor) -> float:
    model.eval()
    error = F.mse_loss(model(noisy), clean).item()
    model.train()
    return error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/accumulation", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--size", type=int, default=61 * BATCH, help="waves in an epoch")
    options = parser.parse_args()

    torch.set_num_threads(1)  # quicker for so small a model
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*make_waves(options.size)), batch_size=BATCH, shuffle=True)
    test_waves = make_waves(500)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
    settings = holdfast.Settings(keep_best="min:val_error")
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with holdfast.Run(options.folder, settings=settings, **state) as run:
        for _ in run.epochs(options.epochs):
            for noisy, clean in run.batches(loader, accumulate=ACCUMULATE):
                error = F.mse_loss(model(noisy), clean)
                (error / ACCUMULATE).backward()
                if run.completes_step:
                    optimizer.step()
                    optimizer.zero_grad()
                    run.log(error=error)
            scheduler.step()
            with run.phase("eval"):
                run.log(val_error=evaluate(model, *test_waves))

    noise = F.mse_loss(*test_waves).item()
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    error = evaluate(model, *test_waves)
    print(f"noise {noise:.3f}, after denoising {error:.3f}, weights {digest}")


if __name__ == "__main__":
    main()
