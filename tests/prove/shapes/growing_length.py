"""A curriculum: sequences grow as training goes on, and the length is not saved."""

import os
from pathlib import Path

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(6)
text = torch.randint(0, 10, (3000,))
model = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
step, length, tokens_seen_here = 0, 4, 0
if Path("newest.pt").exists():
    saved = torch.load("newest.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
while step < 40:
    words = text[step * 50 :][: length + 1]
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(words[:-1]), words[1:])
    loss.backward()
    optimizer.step()
    tokens_seen_here += length
    step += 1
    if step % 4 == 0:
        length += 2
    if step % 5 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step}, "newest.tmp")
        os.replace("newest.tmp", "newest.pt")
