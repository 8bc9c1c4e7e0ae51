"""What the probes of a chain have told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Probe:
    """One process in the place of a training, by what it has told."""

    told: list[dict[str, Any]] = field(default_factory=list)

    @property
    def here(self) -> dict[str, Any]:
        return self.told[0]

    @property
    def variables(self) -> dict[str, str]:
        return dict(self.here["variables"])

    @property
    def pid(self) -> int:
        return int(self.here["pid"])

    @property
    def key(self) -> tuple[str, int]:
        """Of this process among those of all hosts."""
        return str(self.here["host"]), self.pid

    @property
    def rank(self) -> int:
        return self._number("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK") or 0

    @property
    def world(self) -> int | None:
        """How many there will be; None if nobody says so."""
        names = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        return self._number(*names)

    def expected(self, around: Mapping[str, str]) -> int | None:
        """How many of them this chain starts; `around` is what the doctor itself was told.

        It may be one of several, on each node or in each task, and see only its own.
        """
        step = (around.get("SLURM_JOB_ID", ""), around.get("SLURM_STEP_ID", ""))
        if self.step not in ("", ".".join(step)):
            return self.world
        here = self.variables.get("LOCAL_WORLD_SIZE", "")
        if "TORCHELASTIC_RUN_ID" in self.variables and here.isdigit():
            return int(here)
        return 1 if "WORLD_SIZE" in around or all(step) else self.world

    def _number(self, *names: str) -> int | None:
        words = self.variables
        # Under torchrun the tasks of srun are its agents; and a batch script has numbers, too.
        in_step = "SLURM_STEP_ID" in words and "TORCHELASTIC_RUN_ID" not in words
        known = [words.get(name, "") for name in names if in_step or not name.startswith("SLURM")]
        return next((int(text) for text in known if text.isdigit()), None)

    @property
    def step(self) -> str:
        """The job step, as scancel takes it; empty outside of one."""
        job, step = (self.variables.get(f"SLURM_{name}_ID", "") for name in ("JOB", "STEP"))
        return f"{job}.{step}" if job.isdigit() and step.isdigit() else ""

    def events(self, what: str) -> list[dict[str, Any]]:
        return [each for each in self.told if each.get("what") == what]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """What one process has told; a line that is being written has no end yet."""
    try:
        whole = path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]
    except (OSError, ValueError):
        return []
