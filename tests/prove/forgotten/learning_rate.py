"""Forgotten: the scheduler is not among the keywords of the run."""

import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def main():
    torch.set_num_threads(1)
    torch.manual_seed(6)
    points = torch.randn(120, 5)
    loader = DataLoader(
        TensorDataset(points, points.sin().sum(dim=1, keepdim=True)), batch_size=12, shuffle=True
    )
    model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)
    with holdfast.Run("runs/rate", model=model, optimizer=optimizer) as run:
        for _ in run.epochs(4):
            for batch, values in run.batches(loader):
                loss = nn.functional.mse_loss(model(batch), values)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                run.log(loss=loss, rate=scheduler.get_last_lr()[0])
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
