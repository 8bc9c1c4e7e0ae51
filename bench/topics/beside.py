"""Interference: a training on every core, with a save in the background and without one.

Each way trains in a process of its own. In every round it makes the same number of steps twice,
once beside a save that begins with them and once alone, in an order that is drawn. What a save
costs beside its stall is how much longer the steps took; the target is a share of how long the
save went on.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.figures import LIMIT, OURS, Row, Table
from bench.ours import Holdfast
from bench.peers import DcpAsync, DcpProcess, DLRover
from bench.plan import Plan
from bench.states import State, transformer
from bench.turns import Failed, Seat, remove
from bench.ways import Way

MOST_SHARE = 0.05


def measure(plan: Plan) -> list[Table]:
    peers = (DcpAsync,) if plan.quick else (DcpAsync, DcpProcess, DLRover)
    ways: list[Way] = [Holdfast(), *(peer() for peer in peers if plan.peers)]
    megabytes = plan.megabytes if plan.quick else plan.megabytes // 2
    least = 1.0 if plan.quick else 2.0
    walls, shares = [Row("no save", LIMIT)], []
    with plan.place("beside") as folder:
        state = transformer(megabytes)
        for way in ways:
            place = folder / way.folder_name
            place.mkdir()
            target = MOST_SHARE if way.kind == OURS else None
            share = Row(way.name, way.kind, at_most_value=target)
            wall = Row(way.name, way.kind)
            shares.append(share)
            walls.append(wall)
            seat = Seat(folder / f"{way.folder_name}.log", _training(way, state, place, least))
            try:
                seat.ask("open")
                # Ours more often, since it has a target that is smaller than the spread of a round.
                rounds = plan.rounds * (2 if way.kind == OURS else 1)
                for number in range(rounds):
                    found = seat.ask("round", number).value
                    wall.values.append(found["with"] / found["without"])
                    share.values.append(found["share"])
                seat.ask("close")
            except Failed as failure:
                if way.kind == OURS:
                    raise
                wall.word = share.word = f"failed: {failure}"
                wall.values, share.values = [], []
            finally:
                seat.leave()
    walls[0].values = [1.0]
    setting = (
        f"{state.size_bytes / 1e6:.0f} MB of model + AdamW, {2 * plan.rounds} rounds "
        f"({plan.rounds} of peers), about {least:g} s of training on every core, with one save at "
        "its beginning"
    )
    return [
        Table(
            "interference",
            "Interference: wall time of training with a save, stall included, against none",
            "",
            walls,
            setting,
            "no save",
            "× no save",
        ),
        Table(
            "interference-share",
            "Interference: what a save costs beside its stall, as a share of how long it goes on",
            "%",
            shares,
            setting,
        ),
    ]


def _training(
    way: Way, state: State, folder: Path, least_seconds: float
) -> Callable[[], dict[str, Callable[..., Any]]]:
    def acts() -> dict[str, Callable[..., Any]]:
        optimizer = state.optimizer
        assert optimizer is not None
        batch = torch.randn(2, 32, next(state.model.parameters()).shape[-1])
        steps = 1

        def train() -> None:
            for _ in range(steps):
                state.model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)

        def open_and_calibrate() -> None:
            nonlocal steps
            way.open(state, folder)
            for number in range(way.warm_ups):
                train()
                way.save(number)
            train()
            began = time.perf_counter()
            train()
            steps = math.ceil(least_seconds / (time.perf_counter() - began))

        def alone() -> float:
            began = time.perf_counter()
            train()
            return time.perf_counter() - began

        def beside(number: int) -> tuple[float, float, float]:
            over = threading.Event()
            began = time.perf_counter()
            pending = way.begin(number)
            stall = time.perf_counter() - began
            lasted: list[float] = []

            def look() -> None:
                # Asked, not waited for: a save that somebody waits for may take more.
                assert pending.is_over is not None
                while not pending.is_over():
                    time.sleep(0.01)
                lasted.append(time.perf_counter() - began)
                over.set()

            threading.Thread(target=look, daemon=True).start()
            train()
            wall = time.perf_counter() - began
            over.wait()
            pending.wait()
            remove(folder / f"save-{number - 1}")
            way.rest()
            return wall, stall, lasted[0] - stall

        def one_round(number: int) -> dict[str, float]:
            number += way.warm_ups
            if random.Random(number).random() < 0.5:
                without = alone()
                wall, stall, lasted = beside(number)
            else:
                wall, stall, lasted = beside(number)
                without = alone()
            # A save that goes on after the last step has disturbed only those there were.
            disturbed = min(lasted, wall - stall)
            return {"with": wall, "without": without, "share": (wall - stall - without) / disturbed}

        return {"open": open_and_calibrate, "round": one_round, "close": way.close}

    return acts
