"""Start-up: what a script pays before its first step."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from bench.figures import LIMIT, OURS, Row, Table
from bench.plan import Plan

IMPORT_SECONDS = 0.06
_CLOCK = "import time; began = time.perf_counter(); "
_DONE = "print(time.perf_counter() - began)"
_OPEN = """
import sys, time, torch, holdfast
holdfast.Run
model = torch.nn.Linear(100, 100)
began = time.perf_counter()
with holdfast.Run(sys.argv[1], model=model) as run:
    run.boundary()
    print(time.perf_counter() - began)
"""


def measure(plan: Plan) -> list[Table]:
    programs = {
        "import torch": f"{_CLOCK}import torch; {_DONE}",
        "import holdfast": f"{_CLOCK}import holdfast; {_DONE}",
        "import holdfast, then holdfast.Run": f"{_CLOCK}import holdfast; holdfast.Run; {_DONE}",
        "a new run, until its first boundary is over": _OPEN,
    }
    found: dict[str, list[float]] = {name: [] for name in programs}
    drawn = random.Random(6)
    with plan.place("start") as folder:
        _seconds(_OPEN, folder / "warm-up")  # after which everything is compiled and cached
        for number in range(max(plan.rounds, 3)):
            for name in drawn.sample(list(programs), len(programs)):
                place = folder / f"run-{number}"
                found[name].append(_seconds(programs[name], place))
    rows = [
        Row(name, LIMIT if name == "import torch" else OURS, values)
        for name, values in found.items()
    ]
    rows[1].at_most_value = IMPORT_SECONDS
    title = "Start-up"
    return [Table("start", title, "ms", rows, f"{plan.rounds} rounds", "import torch", "× torch")]


def _seconds(program: str, place: Path) -> float:
    command = [sys.executable, "-W", "ignore", "-c", program, str(place)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(done.stdout.split()[0])
