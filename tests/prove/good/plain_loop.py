"""A plain loop with functions; batches, dropout and all come from the one generator it saves."""

import hashlib
import os
from pathlib import Path

import torch
from torch import nn

STEPS = 44
NEWEST = Path("newest.pt")


def save(step, **parts):
    state = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"step": step, "random": torch.get_rng_state(), "parts": state}, "newest.tmp")
    os.replace("newest.tmp", NEWEST)


def load(**parts):
    if not NEWEST.exists():
        return 0
    saved = torch.load(NEWEST)
    for name, part in parts.items():
        part.load_state_dict(saved["parts"][name])
    torch.set_rng_state(saved["random"])
    return saved["step"]


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    points = torch.randn(300, 6)
    values = points.cos().prod(dim=1, keepdim=True)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.2), nn.Linear(24, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=STEPS)
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    for step in range(load(**parts), STEPS):
        chosen = torch.randint(300, (16,))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(points[chosen]), values[chosen]).backward()
        optimizer.step()
        scheduler.step()
        if (step + 1) % 5 == 0 or step + 1 == STEPS:
            save(step + 1, **parts)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
