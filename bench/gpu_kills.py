"""Kills at random times on a GPU: how long the resume takes, and how much work is lost.

    PYTHONPATH=src python bench/gpu_kills.py [--millions 404] [--kills 20] [--steps 400]

Each attempt is a process that trains with the public API and default settings. The driver kills it
with -9 at a random time after the run is open, and starts it again. The last attempt goes on to the
end; its weights are compared with those of an undisturbed training. Prints one line of JSON: per
kill the seconds from `with Run` to the first step (`resume`), where the state came from, the time
from there to the first snapshot (`first_snapshot`), and the work lost in seconds of training.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WIDTH, HIDDEN = 1024, 8192


def train(folder: str, millions: int, steps: int, device: str) -> None:
    import torch

    import holdfast

    began = time.time()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    blocks = []
    for _ in range(round(millions * 1e6 / (2 * WIDTH * HIDDEN))):
        blocks += [
            torch.nn.Linear(WIDTH, HIDDEN, device=device),
            torch.nn.ReLU(),
            torch.nn.Linear(HIDDEN, WIDTH, device=device),
            torch.nn.LayerNorm(WIDTH, device=device),
        ]
    model = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    inputs = torch.randn(2048, WIDTH, device=device)

    def step(number: int) -> None:
        loss = (model(inputs + number * 1e-3) - inputs).square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    if folder:
        opened = time.time()
        with holdfast.Run(folder, model=model, optimizer=optimizer) as run:
            print("open", run.step, opened - began, time.time() - opened, flush=True)
            for number in run.steps(steps):
                step(number)
                print("step", number + 1, time.time(), flush=True)
    else:
        for number in range(steps):
            step(number)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    print("hash", digest.hexdigest(), flush=True)


def start(output: Path, *arguments: object) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--train", *map(str, arguments)]
    with output.open("wb") as file:
        return subprocess.Popen(command, stdout=file)


def lines_of(output: Path, kind: str) -> list[list[str]]:
    whole = output.read_text().rpartition("\n")[0]  # the last line may still be written
    return [words[1:] for words in map(str.split, whole.splitlines()) if words[:1] == [kind]]


def newest_snapshot(folder: Path) -> int | None:
    """The step of the newest whole slot in memory, from the arenas of this run."""
    from holdfast._store.folder.attempts import read_json
    from holdfast._store.folder.layout import RunLayout
    from holdfast._store.memory.arena import Arena
    from holdfast._store.memory.backing import find_leftovers

    found: list[int] = []
    run_id = str(read_json(RunLayout(folder).identity).get("run_id", ""))
    for path in find_leftovers(run_id):
        try:
            with Arena(os.open(path, os.O_RDWR)) as arena:
                if arena.waits_until is None:
                    found += [record.step for record in arena.whole()]
        except (OSError, ValueError):
            continue
    return max(found, default=None)


def kill_once(place: Path, options: argparse.Namespace, delay: float) -> dict[str, Any]:
    folder, output = place / "run", place / "output"
    process = start(output, folder, options.millions, options.steps, options.device)
    while not (found := lines_of(output, "open")):
        time.sleep(0.005)
    opened = time.time()
    step, build, resume = found[0]
    kill = {"delay": delay, "step": int(step), "build": float(build), "resume": float(resume)}
    while time.time() < opened + delay:
        if "first_snapshot" not in kill and newest_snapshot(folder) is not None:
            kill["first_snapshot"] = time.time() - opened
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    kill["killed"] = time.time()
    process.wait()
    return {**kill, "steps": {int(step): float(at) for step, at in lines_of(output, "step")}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", nargs=4)
    parser.add_argument("--millions", type=int, default=404)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--longest", type=float, default=6.0, help="seconds before a kill")
    options = parser.parse_args()
    if options.train:
        folder, millions, steps, device = options.train
        train("" if folder == "-" else folder, int(millions), int(steps), device)
        return
    place = Path(tempfile.mkdtemp(prefix="gpu-kills"))
    folder = place / "run"
    random.seed(2)
    delays = [random.uniform(0.2, options.longest) for _ in range(options.kills)]
    kills = []
    for delay in delays:
        kills.append(kill_once(place, options, delay))
        rest = {name: value for name, value in kills[-1].items() if name != "steps"}
        print(json.dumps(rest), list(kills[-1]["steps"].items())[-40:], file=sys.stderr)
    hashes = []
    for name in (str(folder), "-"):
        output = place / f"output{name == '-'}"
        start(output, name, options.millions, options.steps, options.device).wait()
        hashes.append(lines_of(output, "hash"))
    opened = lines_of(place / "outputFalse", "open")[0]
    resumed_at = [*(each["step"] for each in kills[1:]), int(opened[0])]
    for each, step in zip(kills, resumed_at, strict=True):
        # A step of an earlier attempt: all of this one is lost.
        began = each["killed"] - each["delay"]
        each["lost"] = each["killed"] - each["steps"].get(step, began)
    journal = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    sources = [event.get("source") for event in journal if event["event"] == "start"]
    result = {
        "millions": options.millions,
        "equal": hashes[0] == hashes[1],
        "sources": sources,
        "resume": [each["resume"] for each in kills[1:]] + [float(opened[2])],
        "first_snapshot": [each.get("first_snapshot") for each in kills],
        "lost": [each["lost"] for each in kills],
        "steps": [len(each["steps"]) for each in kills],
        "build": statistics.median(each["build"] for each in kills),
    }
    result["median_resume"] = statistics.median(result["resume"])
    result["most_lost"] = max(result["lost"])
    rounded = json.loads(json.dumps(result), parse_float=lambda text: round(float(text), 3))
    print(json.dumps(rounded))
    shutil.rmtree(place)


if __name__ == "__main__":
    main()
