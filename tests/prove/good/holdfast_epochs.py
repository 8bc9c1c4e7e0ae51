"""A holdfast run of epochs and batches, with an evaluation after each epoch."""

import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def evaluate(model, points, values):
    model.eval()
    with torch.no_grad():
        error = nn.functional.mse_loss(model(points), values).item()
    model.train()
    return error


def main():
    torch.set_num_threads(1)
    torch.manual_seed(4)
    points = torch.rand(150, 3)
    values = points.square().sum(dim=1, keepdim=True)
    loader = DataLoader(TensorDataset(points, values), batch_size=15, shuffle=True)
    model = nn.Sequential(nn.Linear(3, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.7)
    best = torch.tensor(float("inf"))
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "best": best}
    with holdfast.Run("runs/epochs", **parts) as run:
        for _ in run.epochs(5):
            for batch, answers in run.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(batch), answers)
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
            scheduler.step()
            with run.phase("eval"):
                error = evaluate(model, points, values)
                run.log(error=error)
            best.clamp_(max=error)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16], best.item())


if __name__ == "__main__":
    main()
