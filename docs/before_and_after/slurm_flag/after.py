"""SLURM's warning makes the step durable; holdfast then requeues the job and leaves with 75."""

import hashlib
import time

import torch
from torch import nn
from torch.nn import functional as F

import holdfast

STEPS = 50


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(4)
    teacher = torch.randn(10, 3)
    model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)

    losses = []
    with holdfast.Run("run", model=model, optimizer=optimizer, losses=losses) as run:
        for _ in run.steps(STEPS):
            x = torch.randn(32, 10)
            loss = F.cross_entropy(model(x), (x @ teacher).argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            time.sleep(0.01)  # stands for a larger model

    print(f"mean loss {sum(losses) / len(losses):.4f}")
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main()
