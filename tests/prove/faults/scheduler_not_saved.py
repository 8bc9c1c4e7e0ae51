"""Forgotten: the scheduler is not in the checkpoint, so after a resume it warms up again."""

import hashlib
import os
from pathlib import Path

import torch
from torch import nn

TOTAL, PER_EPOCH, BATCH = 48, 12, 16
CHECKPOINT = Path("checkpoint.pt")


def make_data():
    points = torch.randn(PER_EPOCH * BATCH, 6)
    return points, points.sin().sum(dim=1, keepdim=True)


def choose_batch(step):
    generator = torch.Generator().manual_seed(step // PER_EPOCH)
    order = torch.randperm(PER_EPOCH * BATCH, generator=generator)
    return order[step % PER_EPOCH * BATCH :][:BATCH]


def save(step, model, optimizer):
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
    }
    torch.save(state, "checkpoint.tmp")
    os.replace("checkpoint.tmp", CHECKPOINT)


def load(model, optimizer):
    if not CHECKPOINT.exists():
        return 0
    state = torch.load(CHECKPOINT)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    return state["step"]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    points, values = make_data()
    model = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 20))
    for step in range(load(model, optimizer), TOTAL):
        chosen = choose_batch(step)
        loss = nn.functional.mse_loss(model(points[chosen]), values[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if (step + 1) % 7 == 0 or step + 1 == TOTAL:
            save(step + 1, model, optimizer)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
