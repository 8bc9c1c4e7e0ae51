"""A training that is interrupted again and again, and what its lives have left behind."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.support import arena_files, environment, keepers, wait_until

ROOT = Path(__file__).parents[2]
SLEEP_SECONDS = 0.006
BRAKE_LINES = 2
BRAKE_SECONDS = 0.25
MOST_SHARE = 0.7  # of the training is done when it is interrupted for the last time
Line = dict[str, Any]


class Life:
    """One process of a training."""

    def __init__(self, number: int, output: Path) -> None:
        self.number = number
        self.pid = 0
        self.status: int | None = None
        self._output = output

    @property
    def is_over(self) -> bool:
        return self.status is not None

    @property
    def output(self) -> str:
        return self._output.read_text() if self._output.exists() else ""

    def poll(self) -> int | None:
        return self.status

    def send(self, number: int) -> None:
        if not self.is_over:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 60.0) -> int:
        wait_until(lambda: self.is_over, seconds, f"the end of\n{self.output}\n")
        assert self.status is not None
        return self.status


class Zygote:
    """The process that forks the trainings; all of them end with it."""

    def __init__(self, module: str = "tests.data.zygote", *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=environment(OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT)),
        )
        self.lives: list[Life] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, output: Path, *argv: Any, **more: Any) -> Life:
        life = Life(len(self.lives), output)
        self.lives.append(life)
        request = {"number": life.number, "output": str(output), "argv": [str(a) for a in argv]}
        request |= more
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        wait_until(lambda: life.pid, 60, "the zygote's child")
        return life

    def processes(self, *lives: Life) -> list[psutil.Process]:
        """Whatever still runs in the sessions of the trainings: they, and their workers."""
        sessions = {life.pid for life in lives or self.lives}
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) in sessions and process.status() != "zombie":
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            life = self.lives[answer["number"]]
            life.pid = answer.get("pid", life.pid)
            life.status = answer.get("status")


class Training:
    """One run folder with its trace, over all its lives."""

    def __init__(self, zygote: Zygote, kind: str, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder / "run"
        self._zygote = zygote
        self._settings = settings
        self._kind = kind
        self._trace = folder / "trace"
        self._result = folder / "result"
        self._output = folder / "output"
        self.lives: list[Life] = []

    @property
    def output(self) -> str:
        return self.lives[-1].output

    def begin(self, *more: Any) -> Life:
        words = (self._kind, self.folder, self._trace, self._result)
        settings = ("--settings", json.dumps(self._settings))
        life = self._zygote.start(self._output, *words, *settings, *more)
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
        life.send(number)
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
    assert life.wait(90) == 0, life.output
    return statuses


def _reached(training: Training, reference: list[Line]) -> int:
    """How much of the undisturbed course a training has come to so far."""
    places = {tuple(line["at"]): place for place, line in enumerate(reference, start=1)}
    return max((places[tuple(line["at"])] for line in training.lines()), default=0)
