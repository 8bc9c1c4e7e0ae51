"""Rules that stop a run: early stopping, a budget, and nothing that is not a number.

    python examples/early_stopping.py

It trains until the error of the validation has not become better for some epochs, and then the
code behind the loop runs. Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status
runs` shows its pid), and start the same command again: the rules go on counting where they were, so
it ends at the same epoch, with the same hash of the weights. Started once more it is over at once.
"""

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.rules import Budget, Diverged, NotFinite, Plateau

BATCH = 32


def make_points(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A curved surface, seen through noise."""
    place = torch.rand(count, 2) * 4 - 2
    height = torch.sin(2 * place[:, :1]) * torch.cos(place[:, 1:])
    return place, height + torch.randn(count, 1) * 0.3


@torch.no_grad()
def evaluate(model: nn.Module, place: torch.Tensor, height: torch.Tensor) -> float:
    return F.mse_loss(model(place), height).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/early_stopping", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=500, help="at most")
    parser.add_argument("--size", type=int, default=400, help="points to learn from")
    parser.add_argument("--patience", type=int, default=8, help="epochs without a better error")
    options = parser.parse_args()

    torch.set_num_threads(1)  # quicker for so small a model
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*make_points(options.size)), batch_size=BATCH, shuffle=True)
    unseen = make_points(1000)
    model = nn.Sequential(nn.Linear(2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
    model.append(nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rules = (
        Plateau("val_error", patience=options.patience, min_delta=1e-4)  # complete
        | Budget(hours=1)  # enough
        | NotFinite()  # gone wrong: what is bad is never resumed, and the status is 65
        | Diverged("val_error", factor=100)
    )
    settings = holdfast.Settings(keep_best="min:val_error")
    with holdfast.Run(
        options.folder, settings=settings, stop_when=rules, model=model, optimizer=optimizer
    ) as run:
        for _ in run.epochs(options.epochs):
            for place, height in run.batches(loader):
                error = F.mse_loss(model(place), height)
                optimizer.zero_grad()
                error.backward()
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                run.log(error=error, grad_norm=norm)
            with run.phase("eval"):
                run.log(val_error=evaluate(model, *unseen))
        print(f"ended after {run.epoch} epochs: {run.over or 'they were all'}")

    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(f"error {evaluate(model, *unseen):.3f}, weights {digest}")


if __name__ == "__main__":
    main()
