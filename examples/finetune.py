"""Finetuning: train a body on one task, freeze it, train a new head on another, then thaw it.

    python examples/finetune.py

Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status runs` shows its pid), and
start the same command again, in either stage. Each stage is a run of its own: one that is
finished says so, gives its weights and is left. The optimizer knows the body from the start,
since a stored optimizer only goes back into one with the same groups: an `add_param_group` in the
middle would have to be repeated before `Run` opens, when nobody knows the epoch yet. A frozen
parameter has no gradient, so the optimizer passes it over, and what is frozen follows from the
epoch. However often you interrupt it, it ends with the same hash of the weights.
"""

import argparse
import hashlib
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast

LENGTH = 64


def make_waves(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noisy waves; their shapes (sine, square, saw, peaks) and how often they swing (2 to 5)."""
    shapes, swings = torch.randint(4, (2, count))
    turns = (swings[:, None] + 2) * torch.linspace(0, 1, LENGTH) + torch.rand(count, 1)
    sine, saw = torch.sin(2 * math.pi * turns), 2 * (turns % 1) - 1
    drawn = torch.stack([sine, sine.sign(), saw, 2 * saw.abs() - 1])[shapes, torch.arange(count)]
    return (drawn + 0.5 * torch.randn(count, LENGTH))[:, None], shapes, swings


def train(run: holdfast.Run, model: nn.Module, optimizer: torch.optim.Optimizer, loader) -> None:
    for waves, answers in run.batches(loader):
        loss = F.cross_entropy(model(waves), answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)


@torch.no_grad()
def accuracy_of(model: nn.Module, waves: torch.Tensor, answers: torch.Tensor) -> float:
    return (model(waves).argmax(1) == answers).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/finetune", help="where both runs are kept")
    parser.add_argument("--body-epochs", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=24, help="the body is thawed after half")
    options = parser.parse_args()

    torch.set_num_threads(1)  # quicker for so small a model
    torch.manual_seed(0)
    body = nn.Sequential(
        *(nn.Conv1d(1, 16, 9, padding=4), nn.ReLU(), nn.MaxPool1d(4)),
        *(nn.Conv1d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool1d(4), nn.Flatten()),
    )
    shape_model = nn.Sequential(body, nn.Linear(128, 4))
    waves, shapes, _ = make_waves(4000)
    loader = DataLoader(TensorDataset(waves, shapes), batch_size=50, shuffle=True)
    optimizer = torch.optim.AdamW(shape_model.parameters(), lr=2e-3)
    with holdfast.Run(f"{options.folder}/body", model=shape_model, optimizer=optimizer) as run:
        for _ in run.epochs(options.body_epochs):
            train(run, shape_model, optimizer, loader)

    torch.manual_seed(1)  # whatever this life has drawn for the body, the head begins the same
    model = nn.Sequential(body, nn.Linear(128, 4))
    waves, _, swings = make_waves(600)
    loader = DataLoader(TensorDataset(waves, swings), batch_size=20, shuffle=True)
    test_waves, _, test_swings = make_waves(1000)
    groups = [{"params": model[1].parameters()}, {"params": body.parameters(), "lr": 5e-4}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3)
    with holdfast.Run(f"{options.folder}/head", model=model, optimizer=optimizer) as run:
        for epoch in run.epochs(options.epochs):
            body.requires_grad_(epoch >= options.epochs // 2)
            train(run, model, optimizer, loader)
            with run.phase("eval"):
                run.log(accuracy=accuracy_of(model, test_waves, test_swings))

    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(f"accuracy {accuracy_of(model, test_waves, test_swings):.1%}, weights {digest}")


if __name__ == "__main__":
    main()
