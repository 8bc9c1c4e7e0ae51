"""A training on a GPU from a DataLoader with workers and pinned memory, in mixed precision.

Prints `ready STEP`, and at the end `hash HEX` of the weights, moments and all batches' bytes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

# Without it the GPU's matrix products need not be the same twice.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch.utils.data import DataLoader, Dataset

import holdfast


class Noisy(Dataset):
    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64,), index / 640) + torch.randn(64)


def main(folder: str, sleep: float, trace: str) -> None:
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 1)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    loader = DataLoader(
        Noisy(),
        batch_size=16,
        shuffle=True,
        num_workers=2,
        pin_memory=True,
        persistent_workers=True,
    )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    with holdfast.Run(folder, **parts, seen=b"") as run:
        print("ready", run.step, flush=True)
        for _ in run.epochs(5):
            for batch in run.batches(loader):
                batch = batch.to("cuda", non_blocking=True)
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = model(batch).square().mean() + 0.01 * torch.randn((), device="cuda")
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                run.log(loss=loss)
                seen = hashlib.sha256(run.state["seen"] + batch.cpu().numpy().tobytes())
                run.update(seen=seen.digest())
                with Path(trace).open("a") as file:
                    file.write(f"{run.step}\n")
                time.sleep(sleep)
            scheduler.step()
            with run.phase("eval"):
                run.log(val_loss=model(torch.randn(16, 64, device="cuda")).mean())
        digest = hashlib.sha256(run.state["seen"])
    for tensor in (
        *model.state_dict().values(),
        *(optimizer.state[p]["exp_avg"] for p in model.parameters()),
    ):
        digest.update(tensor.detach().cpu().numpy().tobytes())
    print("hash", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
