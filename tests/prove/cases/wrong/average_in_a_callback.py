"""Forgotten: averaged weights, deep inside a trainer’s callback."""

import os
from pathlib import Path

import torch
from torch import nn

STEPS, EVERY = 45, 5
CHECKPOINT = Path("newest.pt")

torch.set_num_threads(1)
torch.manual_seed(0)
points = torch.randn(200, 6)
values = points.cos().prod(dim=1, keepdim=True)


class Average:
    def __init__(self, model):
        self.shadow = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def after_step(self, model):
        for name, tensor in model.state_dict().items():
            self.shadow[name] = 0.9 * self.shadow[name] + 0.1 * tensor


class Callback:
    def __init__(self, model):
        self.average = Average(model)


class Trainer:
    def __init__(self):
        self.model = nn.Linear(6, 1)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.callbacks = [Callback(self.model)]
        self.step = 0

    def load(self):
        saved = torch.load(CHECKPOINT)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        self.step = saved["step"]

    def save(self):
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "random": torch.get_rng_state(), "step": self.step}, "newest.tmp")
        os.replace("newest.tmp", CHECKPOINT)

    def train(self):
        while self.step < STEPS:
            chosen = torch.randint(200, (16,))
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(points[chosen]), values[chosen]).backward()
            self.optimizer.step()
            self.step += 1
            for callback in self.callbacks:
                callback.average.after_step(self.model)
            if self.step % EVERY == 0:
                self.save()


def main():
    trainer = Trainer()
    if CHECKPOINT.exists():
        trainer.load()
    trainer.train()


main()
