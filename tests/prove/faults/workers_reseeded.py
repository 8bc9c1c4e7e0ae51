"""Forgotten: the workers' random generators; after a resume amid an epoch the noise is another."""

import hashlib
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

EPOCHS, BATCHES, SIZE = 3, 10, 8
FILE = Path("noisy.pt")


class NoisyWaves(Dataset):
    def __init__(self):
        turns = torch.linspace(0, 6.28, 16)
        self.waves = torch.sin(turns * torch.rand(BATCHES * SIZE, 1) * 4)

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        clean = self.waves[index]
        return clean + 0.2 * torch.randn(clean.shape), clean


class EpochOrder(Sampler):
    """The batches of one epoch that are left, in the order that belongs to the epoch."""

    def __init__(self, epoch, used):
        self.epoch, self.used = epoch, used

    def __len__(self):
        return BATCHES - self.used

    def __iter__(self):
        generator = torch.Generator().manual_seed(50 + self.epoch)
        order = torch.randperm(BATCHES * SIZE, generator=generator).view(BATCHES, SIZE)
        yield from order[self.used :].tolist()


torch.set_num_threads(1)
torch.manual_seed(2)
data = NoisyWaves()
model = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 16))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
step = 0
if FILE.exists():
    stored = torch.load(FILE)
    model.load_state_dict(stored["model"])
    optimizer.load_state_dict(stored["optimizer"])
    torch.set_rng_state(stored["generator"])
    step = stored["step"]

for epoch in range(step // BATCHES, EPOCHS):
    order = EpochOrder(epoch, step - epoch * BATCHES)
    for noisy, clean in DataLoader(data, batch_sampler=order, num_workers=2):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(noisy), clean).backward()
        optimizer.step()
        step += 1
        if step % 3 == 0:
            stored = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            stored |= {"generator": torch.get_rng_state(), "step": step}
            torch.save(stored, FILE.with_name("noisy.tmp"))
            os.replace("noisy.tmp", FILE)

flat = nn.utils.parameters_to_vector(model.parameters()).detach()
print("weights", hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16])
