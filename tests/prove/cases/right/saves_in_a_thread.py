"""A thread writes copies of the state from a queue, while the next steps are made."""

import copy
import os
import queue
import threading
from pathlib import Path

import torch
from torch import nn

STEPS = 60
CHECKPOINT = Path("newest.pt")

torch.set_num_threads(1)
torch.manual_seed(0)
points = torch.randn(200, 6)
values = points.cos().prod(dim=1, keepdim=True)
waiting = queue.Queue(maxsize=2)


def write():
    while (state := waiting.get()) is not None:
        torch.save(state, "newest.tmp")
        os.replace("newest.tmp", CHECKPOINT)


model = nn.Linear(6, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0
if CHECKPOINT.exists():
    saved = torch.load(CHECKPOINT)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    torch.set_rng_state(saved["random"])
    step = saved["step"]
writer = threading.Thread(target=write, daemon=True)
writer.start()
while step < STEPS:
    chosen = torch.randint(200, (16,))
    optimizer.zero_grad()
    nn.functional.mse_loss(model(points[chosen]), values[chosen]).backward()
    optimizer.step()
    step += 1
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state.update(random=torch.get_rng_state(), step=step)
    waiting.put(copy.deepcopy(state))
waiting.put(None)
writer.join()
