"""Four small batches make one step; it saves behind whole steps only, never part of a gradient."""

import hashlib
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, STEPS_PER_EPOCH, PIECES = 4, 8, 4


def train(model, optimizer, loader, order, path, done):
    for epoch in range(done // STEPS_PER_EPOCH, EPOCHS):
        order.manual_seed(epoch)
        for number, (points, values) in enumerate(loader):
            if epoch * STEPS_PER_EPOCH + number // PIECES < done:
                continue
            loss = nn.functional.mse_loss(model(points), values)
            (loss / PIECES).backward()
            if (number + 1) % PIECES:
                continue
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done % 3 == 0 or done == EPOCHS * STEPS_PER_EPOCH:
                state = {"done": done, "generator": torch.get_rng_state()}
                state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, path + ".part")
                os.replace(path + ".part", path)


def main(path="accumulated.pt"):
    torch.set_num_threads(1)
    torch.manual_seed(7)
    points = torch.randn(STEPS_PER_EPOCH * PIECES * 5, 6)
    data = TensorDataset(points, points.amax(dim=1, keepdim=True))
    order = torch.Generator()
    loader = DataLoader(data, batch_size=5, shuffle=True, generator=order)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Dropout(0.1), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    done = 0
    if Path(path).exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["generator"])
        done = state["done"]
    train(model, optimizer, loader, order, path, done)
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])


if __name__ == "__main__":
    main()
