"""Forgotten: that the step in the checkpoint is already the next one; a resume leaves one out."""

import hashlib
import os
from pathlib import Path

import torch
from torch import nn

FOLDER = Path("checkpoints")
TOTAL = 40


class Checkpointer:
    """Keeps the two newest checkpoints, one file each."""

    def __init__(self, **parts):
        self.parts = parts

    def write(self, step):
        FOLDER.mkdir(exist_ok=True)
        state = {name: part.state_dict() for name, part in self.parts.items()}
        state["step"] = step
        state["torch"] = torch.get_rng_state()
        torch.save(state, FOLDER / "unfinished")
        os.replace(FOLDER / "unfinished", FOLDER / f"step-{step:04d}.pt")
        for old in sorted(FOLDER.glob("step-*.pt"))[:-2]:
            old.unlink()

    def read_newest(self):
        found = sorted(FOLDER.glob("step-*.pt"))
        if not found:
            return 0
        state = torch.load(found[-1])
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["torch"])
        return state["step"] + 1


def batches_from(start):
    for number in range(start, TOTAL):
        generator = torch.Generator().manual_seed(1000 + number)
        images = torch.randn(12, 1, 6, 6, generator=generator)
        yield number, images, images.mean(dim=(1, 2, 3), keepdim=False)


def main():
    torch.set_num_threads(1)
    torch.manual_seed(8)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8, nesterov=True)
    keeper = Checkpointer(model=model, optimizer=optimizer)
    for number, images, means in batches_from(keeper.read_newest()):
        loss = (model(images).squeeze(1) - means).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (number + 1) % 6 == 0 or number + 1 == TOTAL:
            keeper.write(number + 1)
    digest = hashlib.sha256()
    for weight in model.parameters():
        digest.update(weight.detach().numpy().tobytes())
    print("weights", digest.hexdigest()[:16])


main()
