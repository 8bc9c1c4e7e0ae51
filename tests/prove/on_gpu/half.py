"""Half precision on a GPU with dropout, a gradient scaler and everything saved."""

import os
from pathlib import Path

import torch
from torch import nn

torch.manual_seed(11)
inputs = torch.randn(60, 32, 24, device="cuda")
wanted = torch.randn(60, 32, 4, device="cuda")
model = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 4)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=5)
done = 0
if Path("half.pt").exists():
    kept = torch.load("half.pt")
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    done = kept["done"]
    scaler.load_state_dict(kept["scaler"])
    torch.set_rng_state(kept["cpu"].cpu())
    torch.cuda.set_rng_state(kept["gpu"].cpu())
while done < 60:
    with torch.autocast("cuda", torch.float16):
        loss = nn.functional.mse_loss(model(inputs[done]), wanted[done])
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    done += 1
    if done % 4 == 0:
        parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
        kept = {name: part.state_dict() for name, part in parts.items()}
        kept |= {"done": done, "cpu": torch.get_rng_state(), "gpu": torch.cuda.get_rng_state()}
        torch.save(kept, "half.tmp")
        os.replace("half.tmp", "half.pt")
