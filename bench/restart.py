"""From a kill -9 to the next trained step: a plain start, `holdfast run`, the spare, torchrun.

    PYTHONPATH=src python bench/restart.py [--millions 404] [--device cuda] [--rounds 3] [way …]

In each round every way trains the same model, is killed, and is timed until the next process has
trained its first step. The ways:

    plain      python train.py, started by hand after the kill; it begins from nothing
    run        holdfast run -- python train.py
    spare      holdfast run --spare -- python train.py, killed when the spare is ready
    torchrun   torchrun --max-restarts, with torch.save and torch.load

Prints the median, the spread, and the parts of the time: until the script's first own line, until
the model and the optimizer are there, and until the first step is done.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PARTS = ("began", "built", "resumed")
WAYS = ("plain", "run", "spare", "torchrun")
_SCRIPT = """\
import os, sys, time
import torch
import holdfast

way, place, device, layers, width = sys.argv[1], *sys.argv[2:4], *map(int, sys.argv[4:6])


def tell(what):
    with open(os.path.join(place, "events"), "a") as file:
        file.write(f"{os.getpid()} {what} {time.time()}\\n")


tell("began")
torch.manual_seed(0)
blocks = [
    torch.nn.TransformerEncoderLayer(width, 16, 4 * width, 0.0, batch_first=True, device=device)
    for _ in range(layers)
]
model = torch.nn.Sequential(*blocks)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
tell("built")


def train():
    batch = torch.randn(4, 128, width, device=device)
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss.item()
    tell("step")


if way in ("run", "spare"):
    with holdfast.Run(os.path.join(place, "run"), model=model, optimizer=optimizer) as run:
        tell("resumed")
        for _ in run.steps(10**9):
            train()
else:
    path, step = os.path.join(place, "state.pt"), 0
    if way == "torchrun" and os.path.exists(path):
        state = torch.load(path, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    tell("resumed")
    while True:
        train()
        step += 1
        if way == "torchrun" and step == 3:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, path + ".part")
            os.replace(path + ".part", path)
            tell("saved")
"""


class Training:
    """One way of training in a folder of its own."""

    def __init__(self, way: str, folder: Path, words: list[str]) -> None:
        self._way = way
        self._folder = folder
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(_SCRIPT)
        self._plain = [sys.executable, str(script), way, str(folder), *words]
        before = {
            "plain": [],
            "run": [sys.executable, "-m", "holdfast", "run", "--"],
            "spare": [sys.executable, "-m", "holdfast", "run", "--spare", "--"],
        }
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--max-restarts=3",
            "--standalone",
        ]
        self._command = (
            [*launcher, *self._plain[1:]] if way == "torchrun" else before[way] + self._plain
        )
        self._started: list[subprocess.Popen[bytes]] = []
        self._output = folder / "output"

    def events(self) -> list[tuple[int, str, float]]:
        path = self._folder / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(int(pid), what, float(at)) for pid, what, at in map(str.split, lines)]

    def measure(self, seconds: float) -> dict[str, float]:
        self._start(self._command)
        try:
            self._wait(lambda: any(what == "step" for _, what, _ in self.events()), "a step")
            trained_until = time.monotonic() + seconds
            self._wait(lambda: time.monotonic() > trained_until, "the training")
            if self._way == "spare":
                self._wait(lambda: "a spare is ready" in self._text(), "the spare")
            if self._way == "torchrun":
                self._wait(lambda: any(what == "saved" for _, what, _ in self.events()), "a save")
            first = self.events()[0][0]
            at = [time_ for _, what, time_ in self.events() if what == "step"]
            killed = time.time()
            os.kill(first, signal.SIGKILL)
            if self._way == "plain":
                self._started[-1].wait()
                self._start(self._command)
            self._wait(
                lambda: any(p != first and what == "step" for p, what, _ in self.events()), "it"
            )
        finally:
            self._end()
        found = {what: time_ - killed for p, what, time_ in reversed(self.events()) if p != first}
        return found | {"one step": statistics.median(b - a for a, b in itertools.pairwise(at))}

    def _start(self, command: list[str]) -> None:
        environment = {**os.environ, "HOLDFAST_STATE": str(self._folder / "state")}
        environment["HOLDFAST_PROGRESS"] = "off"
        with self._output.open("ab") as file:
            self._started.append(
                subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
            )

    def _text(self) -> str:
        return self._output.read_text(errors="replace")

    def _wait(self, look: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 300
        while not look():
            if time.monotonic() > deadline or self._started[-1].poll() not in (None, -9):
                raise SystemExit(f"{self._way}: {what} did not come\n{self._text()}")
            time.sleep(0.005)

    def _end(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        for process in self._started:
            process.wait(120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("ways", nargs="*", metavar="way", default=list(WAYS))
    parser.add_argument("--millions", type=float, default=404, help="parameters")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8, help="of training before the kill")
    parser.add_argument("--json", type=Path, help="where all figures are kept")
    chosen = parser.parse_args()
    width = 1024 if chosen.millions >= 50 else 256
    layers = max(1, round(chosen.millions * 1e6 / (12 * width * width)))
    ways = chosen.ways
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    drawn = random.Random(5)
    with tempfile.TemporaryDirectory(prefix="holdfast-restart-") as place:
        for number in range(chosen.rounds):
            for way in drawn.sample(ways, len(ways)):
                words = [chosen.device, str(layers), str(width)]
                training = Training(way, Path(place) / f"{way}-{number}", words)
                found[way].append(training.measure(chosen.seconds))
                print(way, {k: round(v, 2) for k, v in found[way][-1].items()}, flush=True)
    print(f"\n{12 * width * width * layers / 1e6:.0f} million parameters, seconds after kill -9")
    columns = ("next step", "least", "most", *_PARTS, "one step")
    print(" " * 10, *(f"{each:>9}" for each in columns))
    for way, all_ in found.items():
        steps = sorted(each["step"] for each in all_)
        middle = {k: statistics.median(each[k] for each in all_) for k in all_[0]}
        parts = [middle[part] for part in _PARTS]
        row = (middle["step"], steps[0], steps[-1], *parts, middle["one step"])
        print(f"{way:10}", *(f"{each:9.2f}" for each in row))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
