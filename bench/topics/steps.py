"""What a step pays when nothing is asked for: alone, and where several ranks must agree."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

import holdfast
from bench import ranks
from bench.figures import LIMIT, OURS, PEER, Row, Table
from bench.ours import QUIET
from bench.plan import Plan
from bench.turns import once

BOUNDARY_SECONDS = 2e-6
AGREEMENT = 0.01


def measure(plan: Plan) -> list[Table]:
    return [boundary(plan), agreement(plan), decisions(plan)]


def boundary(plan: Plan) -> Table:
    with plan.place("boundary") as folder:
        rounds = 3 * plan.rounds
        found = once(folder / "log", lambda: _boundaries(folder, rounds))
    rows = [
        Row("an empty loop", LIMIT, found["empty"]),
        Row("reading a byte of shared memory", PEER, found["byte"]),
        Row("run.boundary(), nothing to do", OURS, found["ours"], at_most_value=BOUNDARY_SECONDS),
        Row("asking for a stop file (os.path.exists)", PEER, found["file"]),
    ]
    setting = f"medians of {rounds} rounds of 10,000"
    return Table("boundary", "A step's boundary with nothing to do", "µs", rows, setting)


def _boundaries(folder: Path, rounds: int) -> dict[str, list[float]]:
    shared, count = mmap.mmap(-1, 4096), 10_000
    path = str(folder / "stop")
    found: dict[str, list[float]] = {}
    with holdfast.Run(folder / "run", settings=QUIET, model=torch.nn.Linear(4, 4)) as run:
        run.boundary()
        ways: dict[str, Callable[[], object]] = {
            "byte": lambda: shared[0],
            "file": lambda: os.path.exists(path),  # noqa: PTH110  as people write it in a loop
        }
        order = random.Random(3)
        for _ in range(rounds):
            for name in order.sample(("empty", "ours", *ways), 4):
                began = time.perf_counter()
                if name == "empty":
                    for _ in range(count):
                        pass
                elif name == "ours":
                    for _ in range(count):
                        run.boundary()
                else:
                    way = ways[name]
                    for _ in range(count):
                        way()
                found.setdefault(name, []).append((time.perf_counter() - began) / count)
    return found


def agreement(plan: Plan) -> Table:
    rows = []
    for world in (2,) if plan.quick else (2, 4):
        found = ranks.measure_world(world, plan.rounds, 5_000 if plan.quick else 20_000)
        plain = f"gloo all_reduce of one integer, {world} ranks"
        rows.append(Row(plain, LIMIT, found["all_reduce"]))
        ours = [whole - empty for whole, empty in zip(found["words"], found["empty"], strict=True)]
        rows.append(Row(f"agreement, {world} ranks", OURS, ours, against=plain, at_most=AGREEMENT))
        whole = [
            all_ - empty for all_, empty in zip(found["boundary"], found["empty"], strict=True)
        ]
        rows.append(Row(f"the whole boundary, {world} ranks", OURS, whole, against=plain))
    title = "Agreement by ranks at a step without a request, and the collective in its place"
    return Table(
        "agreement", title, "µs", rows, f"medians of {plan.rounds} rounds", compared="× all_reduce"
    )


def decisions(plan: Plan) -> Table:
    rows = []
    for size in (8, 64) if plan.quick else ranks.SIZES:
        decided, heard = ranks.measure_decisions(size, plan.rounds)
        rows.append(Row(f"{size} keepers: decided", OURS, decided))
        rows.append(Row(f"{size} keepers: the last one knows", OURS, heard))
    setting = "real keepers without models, over TCP on the loopback, in 5 processes"
    return Table("decision", "From a rank's wish to a decision of all", "ms", rows, setting)
