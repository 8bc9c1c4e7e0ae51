"""Trainings as jobs of a cluster: submitted as a user submits them, and looked at from outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy

from tests.slurm.cluster import Cluster
from tests.support import journal_events, wait_until

TRAIN = Path(__file__).with_name("train.py")
TRAIN_RANKS = Path(__file__).with_name("train_ranks.py")
STEPS = 450  # nine seconds, so that it still trains when a test acts on a slow machine
SECONDS = 0.02  # a step
START_SECONDS = 90.0  # ranks import torch, with other tests beside them


class Training:
    """One run, and the job that trains it."""

    def __init__(self, cluster: Cluster, folder: Path, job: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.job = job

    @classmethod
    def submit(
        cls,
        cluster: Cluster,
        place: Path,
        *options: str,
        script: Path = TRAIN,
        steps: int = STEPS,
        seconds: float = SECONDS,
        name: str = "run",
    ) -> Training:
        """By `holdfast submit`."""
        folder = place / name
        command = ["python", str(script), str(folder), str(steps), str(seconds)]
        return cls(cluster, folder, submit(cluster, place, *options, command=command))

    @property
    def log(self) -> str:
        return self.cluster.log(self.job)

    def wait_for_memory(self, least: int) -> int:
        """Wait until the first rank has a snapshot of this step, or of a later one."""
        return self.wait_for_step(least, key="memory_step")

    def wait_for_step(self, least: int, attempt: int = 1, key: str = "step") -> int:
        """Wait until this life of the run is so far, by its heartbeat."""

        def look() -> int:
            beat = read(self.folder / "attempts" / f"{attempt:04d}" / "heartbeat.json")
            step = int(beat.get(key) or 0)
            return step if step >= least else 0

        try:
            return wait_until(look, START_SECONDS, f"step {least} of attempt {attempt}")
        except AssertionError as error:
            show = self.cluster.show(self.job)
            raise AssertionError(f"{error}\n{show}\n{self.log}") from None

    def wait_for_exit(self, attempt: int = 1) -> dict[str, Any]:
        """How a life of the run ended, by its own word."""
        path = self.folder / "attempts" / f"{attempt:04d}" / "exit.json"
        try:
            wait_until(path.exists, START_SECONDS, f"the end of attempt {attempt}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log}") from None
        return read(path)

    def wait_until_trained(self, seconds: float = 60.0) -> None:
        self.cluster.wait(self.job, "COMPLETED", seconds)

    @property
    def lives(self) -> list[int]:
        """The steps at which its lives began."""
        return [event["step"] for event in journal_events(self.folder, "start")]

    @property
    def requeues(self) -> list[dict[str, Any]]:
        return journal_events(self.folder, "requeue")

    @property
    def newest_on_disk(self) -> int:
        names = [path.name for path in (self.folder / "checkpoints").glob("step-*")]
        return max((int(name.split("-")[1]) for name in names), default=0)

    def check_equal(self, undisturbed: Path) -> None:
        """To the bit, in the end."""
        found = numpy.load(f"{self.folder}.npy")
        assert found.tobytes() == numpy.load(undisturbed).tobytes(), self.log


def submit(cluster: Cluster, place: Path, *options: str, command: list[str]) -> str:
    """By `holdfast submit`, whatever the command; returns the job's number."""
    limit = () if any(option.startswith("--time") for option in options) else ("--time=10",)
    said = holdfast(cluster, place, "submit", *limit, *options, "--", *command)
    found = re.search(r"submitted as job (\d+)", said)
    assert found is not None, said
    return found[1]


def holdfast(cluster: Cluster, place: Path, *words: str, status: int = 0) -> str:
    """Call the command as a user of this cluster does."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("holdfast")), *words],
        cwd=place,
        env=cluster.environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def read(path: Path) -> dict[str, Any]:
    """A small file of a run; empty if there is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def train_undisturbed(place: Path, steps: int = STEPS) -> Path:
    """Without SLURM and without a pause: what every job must come to."""
    folder = place / "undisturbed"
    command = [sys.executable, str(TRAIN), str(folder), str(steps), "0"]
    subprocess.run(command, check=True, timeout=60, capture_output=True)
    return Path(f"{folder}.npy")
