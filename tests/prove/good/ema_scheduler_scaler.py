"""Averaged weights, a scheduler and a GradScaler, all in the checkpoint."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


@dataclass(frozen=True)
class Config:
    steps: int = 40
    save_every: int = 7
    batch: int = 16
    file: Path = Path("everything.pt")


def digest_of(module):
    vector = nn.utils.parameters_to_vector(module.parameters()).detach()
    return hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:16]


def main(config):
    torch.set_num_threads(1)
    torch.manual_seed(14)
    model = nn.Sequential(nn.Linear(4, 32), nn.GELU(), nn.Dropout(0.05), nn.Linear(32, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=config.steps)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=5)
    parts = [model, average, optimizer, scheduler, scaler]
    step = 0
    if config.file.exists():
        saved = torch.load(config.file)
        for part, state in zip(parts, saved["parts"], strict=True):
            part.load_state_dict(state)
        torch.set_rng_state(saved["random"])
        step = saved["step"]
    while step < config.steps:
        points = torch.rand(config.batch, 4)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            error = model(points).float() - points.sum(dim=1, keepdim=True).sin()
        optimizer.zero_grad()
        scaler.scale(error.square().mean()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(model)
        step += 1
        if step % config.save_every == 0 or step == config.steps:
            saved = {"step": step, "random": torch.get_rng_state()}
            saved["parts"] = [part.state_dict() for part in parts]
            torch.save(saved, config.file.with_suffix(".tmp"))
            os.replace(config.file.with_suffix(".tmp"), config.file)
    print("scale", scaler.get_scale(), "ema", digest_of(average), "weights", digest_of(model))


if __name__ == "__main__":
    main(Config())
