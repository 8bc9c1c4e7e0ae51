"""A folder with very many runs, as a sweep leaves it: hyperparameters, curves, ends.

python -m tests.many_runs FOLDER [COUNT]
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

from tests.unit.report_folder import BEGIN, Book

STEPS = 200
_ENDS = (("exit", 0, "closed"), ("exit", 130, "Ctrl-C"), ("death", None, "was killed by SIGKILL"))


def make_sweep(folder: Path, count: int = 1000, rows: int = 25) -> Path:
    """`sweep-0000` and so on; the lowest loss is that of the middle learning rate."""
    for number in range(count):
        make_one(folder / f"sweep-{number:04d}", number, rows)
    return folder


def make_one(folder: Path, number: int, rows: int = 25) -> Book:
    """One run of the sweep, ended."""
    chance = random.Random(number)
    lr = 10 ** (-4 + 3 * (number % 13) / 12)
    book = Book(folder)
    book.begin(1, 0)
    config = {"lr": lr, "seed": number, "model": {"width": 64 << number % 3}, "data": "c4"}
    book.layout.start(1).write_text(json.dumps({"command": ["train.py"], "config": config}))
    far = abs(math.log10(lr) + 2.5)
    for row in range(1, rows + 1):
        step = row * STEPS // rows
        loss = 0.2 + far + 3 * math.exp(-step / 60) + chance.gauss(0, 0.01)
        metrics = {
            "loss": [loss, loss, loss, 1, 0, step],
            "accuracy": [1 / (1 + loss)] * 3 + [1, 0, step],
        }
        book.row(1, 2 + step, step, STEPS // rows, m=metrics)
    kind, status, how = _ENDS[number % len(_ENDS)]
    if status == 0:
        book.note(STEPS + 3, "finished", step=STEPS, total=STEPS, attempt=1)
    book.end(1, STEPS + 4, kind, status=status, how=how, step=STEPS, durable_step=STEPS)
    return book


if __name__ == "__main__":
    print(make_sweep(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1000))
    print(f"their times begin at {BEGIN:.0f}")
