"""Forgotten: the averaged weights, which after a resume begin anew from the current ones."""

import hashlib
import os
from pathlib import Path

import torch
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(21)
STEPS, DECAY = 42, 0.95
last = Path("last.pt")

x = torch.randn(7 * 24, 5)
y = (x * torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0])).sum(1, keepdim=True).tanh()
model = nn.Sequential(nn.Linear(5, 20), nn.Dropout(0.1), nn.SiLU(), nn.Linear(20, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
step = 0
if last.exists():
    checkpoint = torch.load(last)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    torch.set_rng_state(checkpoint["rng"])
    step = checkpoint["step"]
shadow = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def hash_of(tensors):
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]


while step < STEPS:
    epoch, batch = divmod(step, 7)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
    chosen = order[batch * 24 : batch * 24 + 24]
    loss = nn.functional.huber_loss(model(x[chosen]), y[chosen])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    for name, tensor in model.state_dict().items():
        shadow[name].mul_(DECAY).add_(tensor, alpha=1 - DECAY)
    step += 1
    if step == STEPS:  # before the last checkpoint: who finds that one has nothing left to do
        torch.save(shadow, "averaged.tmp")
        os.replace("averaged.tmp", "averaged.pt")
        print("ema", hash_of(shadow.values()))
    if step % 6 == 0 or step == STEPS:
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoint.update(rng=torch.get_rng_state(), step=step)
        torch.save(checkpoint, "last.tmp")
        os.replace("last.tmp", last)

print("weights", hash_of(model.state_dict().values()))
