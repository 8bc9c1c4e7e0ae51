"""A small real training that the tests stop, kill and resume.

Prints `ready STEP RESUMED_FROM ATTEMPT` when its loop begins and `hash HEX` of all
its state when it has trained to the end.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import random
import signal
import sys
import time
from pathlib import Path

import torch

import holdfast


def build(size: int, device: str = "cpu") -> tuple[torch.nn.Module, torch.optim.Optimizer, object]:
    torch.manual_seed(7)
    random.seed(7)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, size),
        torch.nn.Dropout(0.2),
        torch.nn.ReLU(),
        torch.nn.Linear(size, 4),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500)
    return model, optimizer, scheduler


def state_hash(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of weights, optimizer and generators: equal only if every bit is."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    for state in optimizer.state.values():
        for name, tensor in state.items():
            digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available():
        digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    digest.update(repr(random.getstate()).encode())
    digest.update(repr([group["lr"] for group in optimizer.param_groups]).encode())
    return digest.hexdigest()


class Noise(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), (index % 97) / 97.0)


def batches(workers: int, context: str, device: str = "cpu"):
    if workers == 0:
        while True:
            yield torch.randn(32, 16, device=device) * (1 + random.random())
    loader = torch.utils.data.DataLoader(
        Noise(), batch_size=32, num_workers=workers, multiprocessing_context=context
    )
    for batch in loader:
        yield batch.to(device)


def busy_in_c(seconds: int, *, with_gil: bool) -> None:
    """A C call that Python cannot interrupt, with or without the interpreter's lock."""
    library = ctypes.PyDLL(None) if with_gil else ctypes.CDLL(None)
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        library.usleep(int(left * 1e6))  # a signal ends usleep early, so go on


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--total", type=int, default=300)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds added to each step")
    parser.add_argument("--size", type=int, default=64, help="width of the hidden layer")
    parser.add_argument("--settings", default="{}", help="holdfast.Settings as JSON")
    parser.add_argument("--trace", type=Path, help="write each completed step here")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--context", default="fork")
    parser.add_argument("--long-call-at", type=int, default=-1, help="step with a long C call")
    parser.add_argument("--long-call-seconds", type=int, default=30)
    parser.add_argument("--hold-gil", action="store_true")
    parser.add_argument("--hold-at", type=int, default=-1, help="step that waits for a file")
    parser.add_argument("--gate", type=Path, help="that file")
    parser.add_argument("--raise-at", type=int, default=-1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--own-handler", action="store_true", help="a SIGTERM handler of its own")
    options = parser.parse_args()
    settings = holdfast.Settings(**json.loads(options.settings))
    if options.own_handler:
        signal.signal(signal.SIGTERM, lambda *_: print("own handler called", flush=True))
    model, optimizer, scheduler = build(options.size, options.device)
    trace = options.trace.open("a", buffering=1) if options.trace else None
    run = holdfast.Run(
        options.folder, settings=settings, model=model, optimizer=optimizer, scheduler=scheduler
    )
    with run:
        print("ready", run.step, run.resumed_from, run.attempt, flush=True)
        source = batches(options.workers, options.context, options.device)
        for step in run.steps(options.total):
            loss = model(next(source)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if step == options.raise_at:
                raise ValueError("planted")
            optimizer.step()
            scheduler.step()
            run.log(loss=loss)
            if step == options.long_call_at:
                print("long call", flush=True)
                busy_in_c(options.long_call_seconds, with_gil=options.hold_gil)
            if step == options.hold_at:
                print("holding", flush=True)
                while not options.gate.exists():
                    time.sleep(0.005)
            if options.sleep:
                time.sleep(options.sleep)
            if trace is not None:
                trace.write(f"{step + 1} {time.time()}\n")
    print("hash", state_hash(model, optimizer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
