"""Two ranks that share one GPU (gloo, CUDA tensors): stopped, killed and resumed, to the same bits.

    python bench/ranks_gpu.py

NCCL wants a GPU for each rank; with one there is, the sums go through gloo and the rest is as ever.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOTAL = 60


def train(folder: str) -> None:
    """One rank."""
    import hashlib

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import holdfast
    import holdfast.torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    holdfast.torch.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    layers = [torch.nn.Linear(1024, 1024) for _ in range(16)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers, torch.nn.Dropout(0.1)).cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    times = []
    with holdfast.Run(folder, model=model, optimizer=optimizer) as run:
        print(f"ready {rank} {run.step}", flush=True)
        for _ in run.steps(TOTAL):
            began = time.perf_counter()
            loss = model(torch.randn(64, 1024, device="cuda")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
            time.sleep(0.02)
    vector = torch.nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    digest = hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:16]
    middle = 1000 * statistics.median(times) if times else 0.0
    print(f"weights {rank} {digest} step {middle:.2f} ms", flush=True)
    dist.destroy_process_group()


def start(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node=2", __file__, str(folder)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def rank_pid(folder: Path, rank: int) -> int:
    newest = max((folder / "attempts").glob("[0-9]*"))
    return int(json.loads((newest / "ranks" / f"{rank:05d}.json").read_text())["trainer_pid"])


def life(folder: Path, what: str) -> list[str]:
    """One life, with an interruption; returns what it said."""
    job = start(folder)
    assert job.stdout is not None
    lines, ready = [], 0
    for line in job.stdout:
        lines.append(line.rstrip())
        ready += line.startswith("ready")
        if ready == 2 and what:
            ready = 3
            time.sleep(0.7)
            if what == "KILL 1":
                os.kill(rank_pid(folder, 1), signal.SIGKILL)
            elif what == "TERM 1":
                os.kill(rank_pid(folder, 1), signal.SIGTERM)
            else:
                job.terminate()
    status = job.wait()
    shown = [line for line in lines if line.startswith(("holdfast", "weights"))]
    print(f"-- {what or 'undisturbed'}: torchrun left with {status}")
    print("\n".join(f"   {line}" for line in shown), flush=True)
    return [line.split()[2] for line in lines if line.startswith("weights")]


def main() -> int:
    with tempfile.TemporaryDirectory() as place:
        undisturbed = life(Path(place) / "a", "")
        folder = Path(place) / "b"
        for what in ("TERM 1", "KILL 1", "TERM agent", ""):
            found = life(folder, what)
    equal = found == undisturbed and len(set(found)) == 1
    print("equal to the bit" if equal else f"DIFFERENT: {undisturbed} {found}")
    return 0 if equal else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        sys.exit(main())
