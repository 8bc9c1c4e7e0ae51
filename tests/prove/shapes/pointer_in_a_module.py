"""As MoCo: the queue of keys is a buffer, but its pointer is a plain number of the module."""

import os
from pathlib import Path

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(4)
images = torch.randn(30, 6, 8)


class Contrast(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(8, 5)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(5, 24), dim=0))
        self.pointer = 0

    def forward(self, images):
        keys = nn.functional.normalize(self.encoder(images), dim=1)
        logits = keys @ self.queue.clone()
        with torch.no_grad():
            self.queue[:, self.pointer : self.pointer + len(keys)] = keys.T
            self.pointer = (self.pointer + len(keys)) % self.queue.shape[1]
        return logits


model = Contrast()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
first = 0
if Path("moco.pt").exists():
    saved = torch.load("moco.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, 30):
    loss = model(images[step]).logsumexp(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 4:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step + 1}, "moco.tmp")
        os.replace("moco.tmp", "moco.pt")
