"""What a snapshot of a GPU training costs, on one GPU.

    python bench/gpu_save.py [--sizes small,medium,large] [--json FILE]

In one run, in turns: training without snapshots, with one every 8th, 4th, 2nd and every step,
with the default cadence, and DCP's async_save of the same state. What this does not show:
several GPUs, NCCL, other devices.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import holdfast
from holdfast._run.driver import session_of

# width, layers, batch: the parameters are 12 · layers · width² + the embedding.
SIZES = {
    "small": (512, 8, 8),
    "base": (768, 12, 16),  # 124 M
    "medium": (1024, 28, 16),  # 404 M
    "large": (2048, 30, 8),  # 1.6 B
}
VOCABULARY, LENGTH = 50304, 1024


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = width // 64

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.blocks(self.words(tokens)))
        logits = x @ self.words.weight.T
        return nn.functional.cross_entropy(
            logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1)
        )


class Training:
    def __init__(self, size: str) -> None:
        width, layers, self.batch = SIZES[size]
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = GPT(width, layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> None:
        tokens = torch.randint(VOCABULARY, (self.batch, LENGTH), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def tensors(self) -> list[torch.Tensor]:
        moments = [
            item
            for held in self.optimizer.state.values()
            for item in held.values()
            if isinstance(item, torch.Tensor)
        ]
        return [*(p.detach() for p in self.model.parameters()), *moments]


def timed(work) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def limits(training: Training) -> dict[str, float]:
    """A copy on the device by torch's best kernel, and nothing else."""
    values = training.tensors
    spare = [torch.empty_like(value) for value in values]
    found = [timed(lambda: torch._foreach_copy_(spare, values)) for _ in range(9)]
    return {"device_copy_ms": 1e3 * statistics.median(found[2:])}


def measure(size: str, blocks: int, steps: int) -> dict[str, object]:
    training = Training(size)
    for _ in range(3):
        training.step()
    tensors = training.tensors
    found: dict[str, object] = {
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "state_gb": sum(t.numel() * t.element_size() for t in tensors) / 1e9,
        **limits(training),
    }
    torch.cuda.empty_cache()
    folder = Path(tempfile.mkdtemp())
    settings = holdfast.Settings(max_overhead=1e-9, checkpoint_every="10h")
    state = {"model": training.model, "optimizer": training.optimizer}
    began = time.perf_counter()
    with holdfast.Run(folder / "run", settings=settings, **state) as run:
        saver = session_of(run).saver
        while saver.newest is None:
            training.step()
            run.boundary()
            saver._take_snapshot(run.step, 0.0)
            torch.cuda.synchronize()
        found["first_snapshot_seconds"] = time.perf_counter() - began
        devices = saver._snapshots._current._copies
        found["registered"] = bool(devices._registered)
        found["with_spare_buffer"] = devices._parts[0]._stage is not None
        found["runs"] = len(devices._parts[0]._spans)
        found["steps"] = in_turns(training, run, blocks, steps)
        found["stall"] = stalls(training, run)
    if size != "large":  # minutes more, and nothing new
        found["cadence"] = by_cadence(training, folder, steps)
        found["dcp"] = dcp(training, folder)
    shutil.rmtree(folder)
    return found


def in_turns(training: Training, run, blocks: int, steps: int) -> dict[str, object]:
    """Seconds of a step with a snapshot every so many steps, in turns."""
    # Where the link is too slow for a state, more often is no use.
    size_bytes = sum(t.numel() * t.element_size() for t in training.tensors)
    steps_fit = size_bytes < 8e9
    ways = [0, 8, 4, 2, 1] if steps_fit else [0, 8, 4]
    found: dict[int, list[float]] = {way: [] for way in ways}
    taken = dict.fromkeys(ways, 0)
    for block in range(blocks):
        for way in ways[block % len(ways) :] + ways[: block % len(ways)]:
            session_of(run).saver._snapshots.wait_for_copies(30)

            def work(way: int = way) -> None:
                for number in range(steps):
                    training.step()
                    run.boundary()
                    due = way and number % way == 0
                    if due and session_of(run).saver._take_snapshot(run.step, 0.0) is not None:
                        taken[way] += 1

            found[way].append(timed(work) / steps)
    plain = statistics.median(found[0])
    return {
        "step_ms": 1e3 * plain,
        "spread_percent": 100 * (max(found[0]) - min(found[0])) / plain,
        **{
            f"every_{way}": {
                # Of neighbours in time: the clock of a GPU wanders.
                "overhead_percent": 100
                * statistics.median(a / b - 1 for a, b in zip(found[way], found[0], strict=True)),
                "snapshots_taken": taken[way],
                "of": blocks * len(range(0, steps, way)),
            }
            for way in ways[1:]
        },
    }


def stalls(training: Training, run) -> dict[str, float]:
    on_device, stalled, on_cpu, home = [], [], [], []
    for _ in range(8):
        training.step()
        session_of(run).saver._snapshots.wait_for_copies(30)
        torch.cuda.synchronize()
        run.boundary()
        began = time.perf_counter()
        session_of(run).saver._take_snapshot(run.step, 0.0)
        on_cpu.append(time.perf_counter() - began)
        devices = session_of(run).saver._snapshots._current._copies
        session_of(run).saver._snapshots.wait_for_copies(30)
        home.append(time.perf_counter() - began)
        on_device.append(devices._costs[-1])
        stalled.append(devices.stall_seconds)
    return {
        "cpu_ms": 1e3 * statistics.median(on_cpu),
        "stall_ms": 1e3 * statistics.median(stalled),
        "counted_cost_ms": 1e3 * statistics.median(on_device),
        "until_whole_ms": 1e3 * statistics.median(home),
    }


def by_cadence(training: Training, folder: Path, steps: int) -> dict[str, object]:
    """The default settings against none, in turns."""
    found: dict[bool, list[float]] = {False: [], True: []}
    gaps: list[float] = []
    state = {"model": training.model, "optimizer": training.optimizer}
    settings = holdfast.Settings(checkpoint_every="10h")
    with holdfast.Run(folder / "cadence", settings=settings, **state) as run:
        while session_of(run).saver.newest is None:
            training.step()
            run.boundary()
        for _ in range(4):
            for with_snapshots in (False, True):
                last, newest = time.perf_counter(), None

                def work(on: bool = with_snapshots) -> None:
                    nonlocal last, newest
                    for _ in range(2 * steps):
                        training.step()
                        if on:
                            run.boundary()
                            if session_of(run).saver.newest is not newest:
                                now = time.perf_counter()
                                if newest is not None:
                                    gaps.append(now - last)
                                newest, last = session_of(run).saver.newest, now

                session_of(run).saver._snapshots.wait_for_copies(30)
                found[with_snapshots].append(timed(work) / (2 * steps))
    ratios = [a / b - 1 for a, b in zip(found[True], found[False], strict=True)]
    return {
        "overhead_percent": 100 * statistics.median(ratios),
        "median_gap_seconds": statistics.median(gaps) if gaps else None,
        "longest_gap_seconds": max(gaps, default=None),
    }


def dcp(training: Training, folder: Path) -> dict[str, float]:
    """The best settings we know: staging of its own, second call."""
    import torch.distributed.checkpoint as checkpoint

    state = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
    found = []
    try:
        for number in range(2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            place = str(folder / f"dcp{number}")
            handle = checkpoint.async_save(state, checkpoint_id=place, no_dist=True)
            found.append(time.perf_counter() - began)
            getattr(handle, "upload_completion", handle).result()
    except Exception as error:  # noqa: BLE001  a peer that does not run is said by a word
        return {"failed": f"{type(error).__name__}: {error}"}
    return {"async_save_returns_ms": 1e3 * found[-1]}


TRAIN = """
import os, sys, time
sys.path[:0] = [{root!r}, {src!r}]
import torch, holdfast
from bench.gpu_save import Training
training = Training({size!r})
with holdfast.Run({folder!r}, model=training.model, optimizer=training.optimizer) as run:
    print("started at", run.step, flush=True)
    for step in run.steps(100000):
        training.step()
        torch.cuda.synchronize()
        print("step", step + 1, time.time(), flush=True)
"""


def kills(size: str, seconds: float, lives: int) -> list[dict[str, float]]:
    """Killed by SIGKILL at the default settings: how much of its work is gone?"""
    folder = tempfile.mkdtemp()
    root = Path(__file__).parents[1]
    text = TRAIN.format(root=str(root), src=str(root / "src"), size=size, folder=f"{folder}/run")
    found = []
    done, at = 0, 0.0
    former: dict[int, float] = {}
    for _ in range(lives):
        process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
        times: dict[int, float] = {}
        assert process.stdout is not None
        resumed = None
        for line in process.stdout:
            if line.startswith("started at"):
                resumed = int(line.split()[2])
                if done:
                    lost = done - resumed
                    found.append({"lost_steps": lost, "lost_seconds": at - former.get(resumed, at)})
                deadline = time.time() + seconds
            elif match := re.match(r"step (\d+) (\S+)", line):
                times[int(match[1])] = float(match[2])
                if time.time() > deadline:
                    break
        process.send_signal(signal.SIGKILL)
        for line in process.stdout:
            if match := re.match(r"step (\d+) (\S+)", line):
                times[int(match[1])] = float(match[2])
        process.wait()
        done, at, former = max(times), times[max(times)], times
    shutil.rmtree(folder, ignore_errors=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="medium,large")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--kills", default="medium")
    parser.add_argument("--lives", type=int, default=4)
    options = parser.parse_args()
    found: dict[str, object] = {
        "machine": f"{torch.cuda.get_device_name()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}"
    }
    for size in filter(None, options.sizes.split(",")):
        began = time.perf_counter()
        found[size] = measure(size, options.blocks, options.steps)
        print(
            size,
            json.dumps(found[size], indent=1),
            f"{time.perf_counter() - began:.0f} s",
            flush=True,
        )
        torch.cuda.empty_cache()
    if options.kills:
        found["kills"] = kills(options.kills, 9.0, options.lives)
        print("kills", json.dumps(found["kills"]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
