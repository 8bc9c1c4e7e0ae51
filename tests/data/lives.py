"""A training that is interrupted again and again, and what its lives have left behind."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from tests.fork_server import Forked, ForkServer
from tests.support import arena_files, environment, keepers, wait_until

SCRIPT = Path(__file__).with_name("train.py")
ROOT = Path(__file__).parents[2]
SLEEP_SECONDS = 0.006
BRAKE_LINES = 2
BRAKE_SECONDS = 0.25
MOST_SHARE = 0.7  # of the training is done when it is interrupted for the last time
Line = dict[str, Any]


class Training:
    """One run folder with its trace, over all its lives."""

    def __init__(
        self, fork_server: ForkServer, kind: str, folder: Path, settings: dict[str, Any]
    ) -> None:
        self.folder = folder / "run"
        self._fork_server = fork_server
        self._settings = settings
        self._kind = kind
        self._trace = folder / "trace"
        self._result = folder / "result"
        self._output = folder / "output"
        self.lives: list[Forked] = []

    @property
    def output(self) -> str:
        return self.lives[-1].output

    def begin(self, *more: Any) -> Forked:
        words = (self._kind, self.folder, self._trace, self._result)
        settings = ("--settings", json.dumps(self._settings))
        life = self._fork_server.start(
            *(SCRIPT, *words, *settings, *more),
            output=self._output,
            env=environment(PYTHONPATH=str(ROOT)),
        )
        self.lives.append(life)
        return life

    def lines(self) -> list[Line]:
        """What was traced by all lives, but for a line that is being written."""
        if not self._trace.exists():
            return []
        whole, _, _ = self._trace.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def lines_by_life(self) -> list[list[Line]]:
        found: dict[int, list[Line]] = {}
        for line in self.lines():
            found.setdefault(line.pop("attempt"), []).append(line)
        return list(found.values())

    def result(self) -> dict[str, str]:
        return dict(json.loads(self._result.read_text()))

    def interrupt(self, aim: int | None, seconds: float, number: int) -> int:
        """Send a signal so long after the start, or after so many lines: at least one is new."""
        before = len(self.lines())
        # In its start a life may be quicker than we are: then it gets a batch or two done.
        brake = 1 if aim is None else max(1, aim - before) + BRAKE_LINES
        brake_seconds = max(BRAKE_SECONDS, seconds)
        life = self.begin(
            *("--sleep", SLEEP_SECONDS, "--brake", brake, "--brake-seconds", brake_seconds)
        )
        if aim is not None:
            wait_until(
                lambda: life.is_over or len(self.lines()) >= max(aim, before + 1),
                60,
                f"line {aim} in\n{life.output}\n",
            )
        time.sleep(seconds)
        assert not life.is_over, life.output
        life.send_signal(number)
        return life.wait()

    def check_nothing_left(self) -> None:
        wait_until(lambda: not keepers(self.folder), 30, "the keeper's end")
        assert arena_files(self.folder) == []


def interrupt_all(
    training: Training,
    number: int,
    count: int,
    reference: list[Line],
    rng: random.Random,
    start_seconds: float,
) -> list[int]:
    """Interrupt a training so often, spread over all of it, and then let it end."""
    statuses = []
    in_start = set(rng.sample(range(count - 1), k=3 * count // 10))  # the last one aims
    at = 0
    for turn in range(count):
        progress = len(training.lines())
        aim = None
        if turn not in in_start:
            at += 1
            share = MOST_SHARE * at / (count - len(in_start))
            aim = progress + max(1, round(share * len(reference)) - _reached(training, reference))
        seconds = rng.uniform(0.0, start_seconds if aim is None else 2 * SLEEP_SECONDS)
        statuses.append(training.interrupt(aim, seconds, number))
    life = training.begin()
    assert life.wait(225) == 0, life.output
    return statuses


def _reached(training: Training, reference: list[Line]) -> int:
    """How much of the undisturbed course a training has come to so far."""
    places = {tuple(line["at"]): place for place, line in enumerate(reference, start=1)}
    return max((places[tuple(line["at"])] for line in training.lines()), default=0)
