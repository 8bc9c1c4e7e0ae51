"""Forgotten: torch's random generator, so after a resume the dropout masks are others."""

import argparse
import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=36)
parser.add_argument("--every", type=int, default=10)
parser.add_argument("--lr", type=float, default=0.02)
options = parser.parse_args()

stop_asked = []
signal.signal(signal.SIGTERM, lambda number, frame: stop_asked.append(number))

torch.set_num_threads(1)
torch.manual_seed(11)
inputs = torch.randn(9, 20, 10)
targets = inputs.mean(dim=2, keepdim=True).exp()
net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1))
optimizer = torch.optim.RMSprop(net.parameters(), lr=options.lr)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)

place = Path("state.pth")
first = 0
if place.is_file():
    state = torch.load(place)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    first = state["next_step"]

for step in range(first, options.steps):
    optimizer.zero_grad()
    nn.functional.l1_loss(net(inputs[step % 9]), targets[step % 9]).backward()
    optimizer.step()
    scheduler.step()
    if stop_asked or (step + 1) % options.every == 0 or step + 1 == options.steps:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"scheduler": scheduler.state_dict(), "next_step": step + 1}
        torch.save(state, place.with_suffix(".new"))
        os.replace(place.with_suffix(".new"), place)
        if stop_asked and step + 1 < options.steps:
            sys.exit(128 + stop_asked[0])

flat = torch.cat([weight.detach().flatten() for weight in net.parameters()])
print("weights", hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16])
