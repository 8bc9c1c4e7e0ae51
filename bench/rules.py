"""What it costs a step to have rules judge its loss.

    python -m bench.rules [--quick]

Steps of a small model, on a GPU where there is one, in rounds of four kinds that take turns in one
process: a loss that is not used, one that is logged, one that is logged and judged by rules,
and the usual way, `loss.item()` and a comparison, for which each step waits for the device. Each
round is timed as a whole, with the device's work at its end. Printed are the medians of the rounds,
as time per step, and their ratio to the first kind.

What this does not show: a snapshot waits for the values of the steps before it, as it waits for
the device anyway; here none falls due within a round but by chance.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import holdfast
from holdfast.rules import NotFinite, Plateau

KINDS = ("no look", "logged", "judged", "item()")


def make_step(device: str) -> Callable[[], torch.Tensor]:
    torch.manual_seed(1)
    width = 1024 if device == "cuda" else 128
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = torch.randn(256 if device == "cuda" else 16, width, device=device)

    def step() -> torch.Tensor:
        loss: torch.Tensor = (model(batch) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return step


def time_round(kind: str, steps: int, step: Callable[[], torch.Tensor], folder: Path) -> float:
    """Seconds per step of one round."""
    judged = kind == "judged"
    rules = NotFinite() | Plateau("loss", patience=10**9) if judged else None
    best = math.inf
    with holdfast.Run(folder, stop_when=rules) as run:
        for number in run.steps(steps + 20):
            if number == 20:  # the first ones warm up
                wait()
                began = time.perf_counter()
            loss = step()
            if kind in ("logged", "judged"):
                run.log(loss=loss)
            elif kind == "item()":
                value = loss.item()
                if not math.isfinite(value):
                    raise ArithmeticError("the loss is not finite")
                best = min(best, value)
            if number == steps + 19:
                wait()
                seconds = time.perf_counter() - began
    return seconds / steps


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    steps, rounds = (300, 3) if parser.parse_args().quick else (1000, 9)
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    step = make_step(device)
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as place, Path(os.devnull).open("w") as nothing:
        for number in range(rounds):
            for kind in KINDS:
                folder = Path(place) / f"{kind}-{number}"
                with contextlib.redirect_stderr(nothing):
                    times[kind].append(time_round(kind, steps, step, folder))
    medians = {kind: statistics.median(values) for kind, values in times.items()}
    print(f"{steps} steps a round, {rounds} rounds of each kind, on {device}")
    for kind, median in medians.items():
        ratio = median / medians["no look"]
        print(f"{kind:8} {median * 1e6:8.1f} µs per step, {ratio:.3f} of no look")


if __name__ == "__main__":
    main()
