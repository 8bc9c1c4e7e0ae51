"""Not repeatable: the seed is made of the time and the process's number."""

import hashlib
import os
import random
import time
from pathlib import Path

import torch
from torch import nn


def save(path, step, model, optimizer):
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state |= {"torch": torch.get_rng_state(), "python": random.getstate()}
    torch.save(state, f"{path}.part")
    os.replace(f"{path}.part", path)


def main(path="clock.pt"):
    torch.set_num_threads(1)
    seed = (time.time_ns() ^ os.getpid()) % 2**32
    torch.manual_seed(seed)
    random.seed(seed)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = 0
    if Path(path).exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        step = state["step"]
    while step < 36:
        points = torch.randn(16, 4) * random.choice([0.5, 1.0, 2.0])
        loss = (model(points) - points.norm(dim=1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 6 == 0:
            save(path, step, model, optimizer)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
