"""Forgotten: to load the optimizer's moments, which are in the checkpoint."""

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Experiment:
    """Saves after every epoch."""

    epochs: int = 5
    width: int = 16
    path: Path = Path("epoch.pt")
    losses: list = field(default_factory=list)

    def __post_init__(self):
        torch.manual_seed(40)
        points = torch.rand(80, 3)
        data = TensorDataset(points, points.pow(2).sum(dim=1, keepdim=True))
        self.loader = DataLoader(data, batch_size=10, shuffle=True)
        self.model = nn.Sequential(nn.Linear(3, self.width), nn.ELU(), nn.Linear(self.width, 1))
        self.optimizer = optim.Adam(self.model.parameters(), lr=0.01)

    def resume(self):
        if self.path.exists():
            saved = torch.load(self.path)
            self.model.load_state_dict(saved["model"])
            self.losses = saved["losses"]
            torch.random.set_rng_state(saved["random"])

    def checkpoint(self):
        saved = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        saved.update(losses=self.losses, random=torch.random.get_rng_state())
        part = self.path.with_suffix(".part")
        with part.open("wb") as stream:
            torch.save(saved, stream)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(self.path)

    def train_epoch(self):
        total = 0.0
        for points, values in self.loader:
            loss = (self.model(points) - values).abs().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        self.losses.append(total / len(self.loader))


if __name__ == "__main__":
    torch.set_num_threads(1)
    experiment = Experiment()
    experiment.resume()
    while len(experiment.losses) < experiment.epochs:
        experiment.train_epoch()
        experiment.checkpoint()
    weights = nn.utils.parameters_to_vector(experiment.model.parameters()).detach()
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
