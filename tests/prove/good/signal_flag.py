"""A handler that only sets a flag; the step's end saves and leaves, 143 for TERM and 0 for INT."""

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

TOTAL = 50


class Flag:
    def __init__(self):
        self.heard = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.hear)

    def hear(self, number, frame):
        self.heard = number


def save(step, model, optimizer):
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state["random"] = torch.get_rng_state()
    torch.save(state, "flag.tmp")
    os.replace("flag.tmp", "flag.pt")


def main():
    flag = Flag()
    torch.set_num_threads(1)
    torch.manual_seed(33)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 2))
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.01)
    step = 0
    if Path("flag.pt").exists():
        state = torch.load("flag.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        step = state["step"]
    while step < TOTAL:
        points = torch.randn(16, 8)
        loss = nn.functional.cross_entropy(model(points), (points[:, 0] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if flag.heard is not None or step % 20 == 0 or step == TOTAL:
            save(step, model, optimizer)
        if flag.heard is not None:
            print("stopped at step", step)
            return 143 if flag.heard == signal.SIGTERM else 0
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
    return 0


if __name__ == "__main__":
    sys.exit(main())
