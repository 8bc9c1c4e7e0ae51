"""Begins anew unless it is told which file to go on from: `--resume latest.pt`."""

import argparse
import hashlib
import os
from pathlib import Path

import torch
from torch import nn


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume", type=Path, help="a checkpoint; one not yet there is no error")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-to", type=Path, default=Path("latest.pt"))
    return parser.parse_args()


class Training:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Dropout(0.1), nn.Linear(20, 1))
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.05)
        self.points = torch.randn(8, 12, 5)
        self.made = 0

    def step_once(self):
        points = self.points[self.made % len(self.points)]
        error = self.model(points) - points.norm(dim=1, keepdim=True)
        self.optimizer.zero_grad()
        error.square().mean().backward()
        self.optimizer.step()
        self.made += 1

    def store(self, path):
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "made": self.made,
            "generator": torch.get_rng_state(),
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        os.replace(part, path)

    def fetch(self, path):
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.made = state["made"]
        torch.set_rng_state(state["generator"])


if __name__ == "__main__":
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(9)
    training = Training()
    if options.resume and options.resume.exists():
        training.fetch(options.resume)
    while training.made < options.steps:
        training.step_once()
        if training.made % 4 == 0 or training.made == options.steps:
            training.store(options.save_to)
    weights = nn.utils.parameters_to_vector(training.model.parameters()).detach()
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
