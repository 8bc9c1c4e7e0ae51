"""SLURM's warning sets a flag; the step that sees it saves, asks for a requeue and leaves."""

import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

STEPS = 50
SAVE_EVERY = 10
CHECKPOINT = Path("checkpoint.pt")
warned = False


def note_warning(_number, _frame) -> None:
    global warned
    warned = True


def requeue() -> None:
    if job := os.environ.get("SLURM_JOB_ID"):
        subprocess.run(["scontrol", "requeue", job], check=True)


def main() -> None:
    signal.signal(signal.SIGUSR1, note_warning)
    signal.signal(signal.SIGUSR2, note_warning)
    torch.set_num_threads(1)
    torch.manual_seed(4)
    teacher = torch.randn(10, 3)
    model = nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    first = 0
    if CHECKPOINT.exists():
        checkpoint = torch.load(CHECKPOINT)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first = checkpoint["step"] + 1

    losses = []
    for step in range(first, STEPS):
        x = torch.randn(32, 10)
        loss = F.cross_entropy(model(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        time.sleep(0.01)  # stands for a larger model
        if warned or (step + 1) % SAVE_EVERY == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(saved, CHECKPOINT)
        if warned:
            requeue()
            sys.exit(0)

    print(f"mean loss {sum(losses) / len(losses):.4f}")
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main()
