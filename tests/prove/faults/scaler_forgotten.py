"""Forgotten: the GradScaler, so after a resume its scale is far too large and steps are skipped."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass
class Config:
    iterations: int = 60
    save_every: int = 9
    batch: int = 16
    rate: float = 0.01
    file: str = "amp.ckpt"


@dataclass
class Parts:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    iteration: int = 0


def build(config: Config) -> Parts:
    model = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=config.rate)
    return Parts(model, optimizer, torch.amp.GradScaler("cpu", growth_interval=7))


def write(parts: Parts, config: Config) -> None:
    saved = {"model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict()}
    saved["iteration"] = parts.iteration
    saved["generator"] = torch.get_rng_state()
    part = Path(config.file + ".tmp")
    torch.save(saved, part)
    os.replace(part, config.file)


def read(parts: Parts, config: Config) -> None:
    if Path(config.file).exists():
        saved = torch.load(config.file)
        parts.model.load_state_dict(saved["model"])
        parts.optimizer.load_state_dict(saved["optimizer"])
        parts.iteration = saved["iteration"]
        torch.set_rng_state(saved["generator"])


def train(parts: Parts, config: Config) -> None:
    while parts.iteration < config.iterations:
        points = torch.rand(config.batch, 4)  # the data come from the generator that is saved
        values = 50 * points.prod(dim=1, keepdim=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(parts.model(points).float(), values)
        parts.optimizer.zero_grad()
        parts.scaler.scale(loss).backward()
        parts.scaler.step(parts.optimizer)
        parts.scaler.update()
        parts.iteration += 1
        if parts.iteration % config.save_every == 0 or parts.iteration == config.iterations:
            write(parts, config)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(5)
    settings = Config()
    everything = build(settings)
    read(everything, settings)
    train(everything, settings)
    vector = nn.utils.parameters_to_vector(everything.model.parameters()).detach()
    print("weights", hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:16])
