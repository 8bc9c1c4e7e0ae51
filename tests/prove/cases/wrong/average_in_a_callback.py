"""Forgotten: averaged weights, deep inside a trainer’s callback."""

import os
from pathlib import Path

import torch
from torch import nn


class Average:
    def __init__(self, model):
        self.shadow = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def follow(self, model):
        for name, tensor in model.state_dict().items():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * tensor


class Callback:
    def __init__(self, average):
        self.average = average


class Trainer:
    def __init__(self):
        self.model = nn.Linear(6, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.callbacks = [Callback(Average(self.model))]
        self.step = 0
        if Path("newest.pt").exists():
            model, optimizer, random, self.step = torch.load("newest.pt")
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
            torch.set_rng_state(random)

    def train(self):
        points = torch.randn(16, 6)
        self.optimizer.zero_grad()
        (self.model(points) - points.prod(dim=1, keepdim=True)).square().mean().backward()
        self.optimizer.step()
        self.step += 1
        for callback in self.callbacks:
            callback.average.follow(self.model)
        if self.step % 5 == 0:
            states = self.model.state_dict(), self.optimizer.state_dict()
            torch.save((*states, torch.get_rng_state(), self.step), "newest.tmp")
            os.replace("newest.tmp", "newest.pt")


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    trainer = Trainer()
    while trainer.step < 45:
        trainer.train()


main()
