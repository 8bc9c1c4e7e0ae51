"""A run folder written as if days had passed: by the real record, with a clock of its own.

What trainer and keeper would have written is written here in bulk, so that a run of forty attempts
takes a second. Whoever changes what a run leaves behind changes this too.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holdfast._environment.processes.identity import ProcessIdentity, of_process
from holdfast._store.folder import series
from holdfast._store.folder.attempts import open_folder, write_json
from holdfast._store.folder.layout import MANIFEST, rank_file
from holdfast._store.format.manifest import DataFile, Manifest, Part

GB = 1 << 30
_KEPT = 3


@dataclass
class Pace:
    """What a training of this run is like."""

    step_seconds: float = 1.2
    state_bytes: int = 20 * GB
    total: int = 400_000
    checkpoint_steps: int = 1500
    limit_bytes: int | None = 256 * GB
    rows_per_attempt: int = 240
    metrics: dict[str, Callable[[int, random.Random], float]] = field(default_factory=dict)


def usual_metrics() -> dict[str, Callable[[int, random.Random], float]]:
    """What people log."""
    return {
        "loss": lambda step, r: 0.4 + 6.5 * math.exp(-step / 40_000) + r.gauss(0, 0.08),
        "val_loss": lambda step, r: 0.6 + 6.1 * math.exp(-step / 42_000) + r.gauss(0, 0.02),
        "grad_norm": lambda step, r: abs(r.gauss(1.0, 0.3)) + (9 if r.random() < 0.004 else 0),
        "lr": lambda step, r: 3e-4 * min(1.0, step / 2000) * (0.55 + 0.45 * math.cos(step / 1.3e5)),
    }


class Story:
    """One run in the making."""

    def __init__(
        self,
        folder: Path,
        began: float,
        *,
        pace: Pace | None = None,
        ranks: int = 1,
        hosts: int = 1,
        job: str | None = None,
        has_series: bool = True,
        seed: int = 7,
    ) -> None:
        self.layout, self.run_id = open_folder(folder)
        self.pace = pace or Pace(metrics=usual_metrics())
        self.random = random.Random(seed)
        self.now, self.step, self.attempt = began, 0, 0
        self.durable, self.durable_attempt = 0, 0
        self.ranks, self.job = ranks, job
        self.hosts = [f"gpu-{number + 1:02d}" for number in range(hosts)]
        self.pid = 4000
        self._has_series = has_series
        self._journal: list[str] = []
        self._rows: list[bytes] = []
        self._kept: list[tuple[int, int, float, str]] = []
        self._origin: tuple[int, int] | None = None
        self.leaked_bytes = 0

    # -- the record -------------------------------------------------------------------------

    def note(self, event: str, **fields: Any) -> None:
        """A line of the journal."""
        if self._has_series and self.attempt:
            fields.setdefault("attempt", self.attempt)
        line = {"time": round(self.now, 3), "event": event, **fields}
        self._journal.append(json.dumps(line) + "\n")

    def write_lines(self, lines: str) -> None:
        """Lines of the journal as they are, very many of them."""
        self._journal.append(lines)

    def record(self, path: Path, **fields: Any) -> None:
        write_json(path, fields, durable=False)
        os.utime(path, (self.now, self.now))

    def close(self) -> Path:
        """All that was told is in the folder now."""
        self._keep_checkpoints()
        with self.layout.journal.open("a") as file:
            file.writelines(self._journal)
        self._journal.clear()
        os.utime(self.layout.journal, (self.now, self.now))
        return self.layout.folder

    # -- an attempt -------------------------------------------------------------------------

    def begin(self, source: str = "disk", *, waited: float = 0.0, is_live: bool = False) -> None:
        """The next attempt starts, `waited` seconds after the one before, from what is durable."""
        self.now += waited
        self.leaked_bytes = 0
        self.attempt += 1
        self.pid += 7 + self.random.randrange(900)
        folder = self.layout.attempt(self.attempt)
        folder.mkdir()
        process = of_process() if is_live else self._process(self.pid)
        self.pid = process.pid
        # What it takes to import a framework and to load the state; the queue comes before.
        since = self.now - min(20.0, waited / 2)
        lease: dict[str, Any] = {"process": asdict(process), "since": since}
        facts: dict[str, Any] = {"host": process.host}
        if self.job is not None:
            lease["job"] = {"number": self.job, "restarts": self.attempt - 1}
            facts |= {
                "job": self.job,
                "job_started": since - min(8.0, waited / 4),
                "restarts": self.attempt - 1,
            }
        self.record(self.layout.lease(self.attempt), **lease)
        self.step = self.durable
        self._origin = (self.durable_attempt, self.step) if self.durable_attempt else None
        origin = self._origin or (None, None)
        self.record(self.layout.origin(self.attempt), attempt=origin[0], step=origin[1])
        ranks = {"ranks": self.ranks} if self.ranks > 1 else {}
        source = source if self._origin else "new"
        head = {"attempt": self.attempt, "step": self.step, "source": source, "pid": self.pid}
        self.note("start", **head, keep_last=_KEPT, keep_best=None, **facts, **ranks)
        self.now += 2 + 4 * self.random.random()
        self.note("loop", attempt=self.attempt, step=self.step, total=self.pace.total)
        self._began, self._rows = self.now, []

    def train(self, steps: int, *, slower: float = 1.0, phase_every: int = 0) -> None:
        """Make steps, with the checkpoints that are due on the way."""
        seconds = self.pace.step_seconds * slower
        each = max(1, steps // self.pace.rows_per_attempt)
        until = self.step + steps
        while self.step < until:
            made = min(each, until - self.step)
            before = self.step
            self.step += made
            self.now += made * seconds * (1 + 0.02 * self.random.random())
            is_due = self.step // self.pace.checkpoint_steps > before // self.pace.checkpoint_steps
            phase = "evaluation" if phase_every and self.step % phase_every < made else None
            self._row(made, seconds, phase=phase, saved=0.9 if is_due else 0.0)
            if phase:
                self.now += 40
                self._row(0, seconds, phase=phase)
            if is_due:
                self.checkpoint("checkpoint_every")

    def checkpoint(self, reason: str, *, step: int | None = None) -> None:
        """A state becomes durable, once."""
        step = self.step if step is None else step
        if (step, self.attempt) == (self.durable, self.durable_attempt):
            return
        name = self.layout.checkpoint(step, self.attempt).name
        whole = self.pace.state_bytes
        written = int(whole * (0.4 + 0.6 * self.random.random()))
        rand = random.Random(step)
        metrics = {k: make(step, rand) for k, make in list(self.pace.metrics.items())[:2]}
        self.note(
            "checkpoint",
            step=step,
            attempt=self.attempt,
            reason=reason,
            size_bytes=whole,
            seconds=round(written / (1.6 * GB) * (1 + 0.3 * self.random.random()), 4),
            name=name,
            metrics=metrics,
            written_bytes=written,
            **({"ranks": self.ranks} if self.ranks > 1 else {}),
        )
        self.durable, self.durable_attempt = step, self.attempt
        self._kept.append((step, self.attempt, self.now, reason))

    def beat(self, **more: Any) -> None:
        """The heartbeat as it was last written."""
        used = self._memory()
        told = {
            "beat": 9,
            "keeper": asdict(self._process(self.pid + 1)),
            "time": self.now,
            "step": self.step,
            "boundary_age_seconds": 0.4,
            "epoch": None,
            "epochs": None,
            "memory_step": self.step - 2 if self.step > 2 else None,
            "memory_time": self.now - 2,
            "slots": 3,
            "in_shm": True,
            "durable_step": self.durable or None,
            "phase": None,
            "step_seconds": self.pace.step_seconds,
            "save_seconds": 14.2,
            "slurm": None,
            "memory": {"t": self.now, **used},
            "paused": None,
            "hang": None,
        }
        if self.ranks > 1:
            told |= {"ranks": [self._seat(rank) for rank in range(self.ranks)]}
        self.record(self.layout.heartbeat(self.attempt), **told, **more)

    def end(self, status: int | None, how: str, *, is_death: bool = False, **more: Any) -> None:
        """The attempt is over, and says so."""
        told = {"status": status, "how": how, "step": self.step, "durable_step": self.durable}
        self.write_rows()
        self.beat()
        self.note("death" if is_death else "exit", attempt=self.attempt, **told)
        when = {} if is_death else {"time": self.now}
        self.record(self.layout.exit(self.attempt), **told, **more, **when)

    def vanish(self) -> None:
        """The machine is gone: nothing says that the attempt is over."""
        self.write_rows()
        self.beat()

    def write_rows(self) -> None:
        if self._has_series:
            with self.layout.series(self.attempt).open("ab") as file:
                file.writelines(self._rows)
        self._rows = []

    # -- what it is made of ------------------------------------------------------------------

    def _row(self, made: int, seconds: float, *, phase: str | None, saved: float = 0.0) -> None:
        if not self._has_series:
            return
        times = Counter(
            series.bucket_of(seconds * self.random.lognormvariate(0, 0.06))
            for _ in range(min(made, 12))
        )
        row: series.Row = {"t": round(self.now, 3), "s": self.step, "n": made}
        if made:
            scale = made // min(made, 12)
            row["h"] = [[bucket, scale * count] for bucket, count in sorted(times.items())]
            row["m"] = {name: self._fold(make, made) for name, make in self.pace.metrics.items()}
            row |= {"snaps": max(1, made // 4), "mem_step": self.step}
        row |= {"disk_step": self.durable, "mem": self._memory()}
        row |= {"save": saved} if saved else {}
        row |= {"phase": phase, "rest": 0.0 if made else 40.0} if phase else {}
        if self.ranks > 1:
            row |= {"agree": round(0.02 * made, 4), "waits": self.waits()}
        self._rows.append(series.encode(row))

    def _fold(
        self, make: Callable[[int, random.Random], float], made: int
    ) -> list[float | int | None]:
        seen = [make(self.step - at, self.random) for at in range(min(made, 4))]
        good = [round(value, 6) for value in seen if math.isfinite(value)]
        ends = [good[-1], min(good), max(good)] if good else [None] * 3
        return [*ends, made, len(seen) - len(good), self.step - 1]

    def waits(self) -> dict[str, float]:
        """What each rank waits for the others in a step; the fourth is the one they wait for."""
        return {
            str(rank): 0.002 if rank == 3 else round(0.18 + 0.03 * self.random.random(), 4)
            for rank in range(self.ranks)
        }

    def _memory(self) -> dict[str, Any]:
        age = max(0.0, self.now - getattr(self, "_began", self.now))
        used = int((90 + min(40, age / 600) + self.random.random()) * GB) + self.leaked_bytes
        limit = self.pace.limit_bytes
        limited = {} if limit is None else {"cgroup": min(limit, used + 70 * GB), "limit": limit}
        return {
            **limited,
            "rss": used,
            "workers": 12 * GB,
            "shm": 3 * self.pace.state_bytes,
            "available": 300 * GB,
            "total": 512 * GB,
            "gpu": [self._gpu(index) for index in range(2)],
        }

    def _gpu(self, index: int) -> list[int]:
        busy = 82 + self.random.randrange(16)
        return [index, 62 * GB, 80 * GB, 61 * GB, busy, 3 * busy + 40 + index, busy // 2 + 20]

    def _seat(self, rank: int) -> dict[str, Any]:
        return {
            "host": self.hosts[rank % len(self.hosts)],
            "pid": self.pid + rank,
            "step": self.step - (rank == 3),
            "memory_step": self.step - 2,
            "phase": None,
            "boundary_age_seconds": 0.3,
            "heard_seconds": 0.2,
            "ended": None,
        }

    def _process(self, pid: int) -> ProcessIdentity:
        """A process of a machine that is not this one."""
        host = self.hosts[self.attempt % len(self.hosts)]
        return ProcessIdentity(pid, "1", host, f"boot-of-{host}", "pid:[1]")

    def _keep_checkpoints(self) -> None:
        for step, attempt, when, reason in self._kept[-_KEPT:]:
            folder = self.layout.checkpoint(step, attempt)
            folder.mkdir()
            size = self.pace.state_bytes // self.ranks
            files = []
            for rank in range(self.ranks):
                path = folder / rank_file(rank)
                with path.open("wb") as file:
                    file.truncate(size)  # of one hole: nobody reads it
                parts = (Part("header", 0, size, "0" * 32),)
                files.append(DataFile(path.name, size, parts))
            origin = self._origin if attempt == self.attempt else None
            found = Manifest(
                self.run_id, attempt, step, reason, when, tuple(files), holdfast="0", origin=origin
            )
            (folder / MANIFEST).write_bytes(found.to_bytes())
