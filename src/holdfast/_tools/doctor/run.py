"""What a run folder knows: the size of the state, and the times of saves and steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast._environment.slurm import controller
from holdfast._environment.slurm.job import find_job
from holdfast._errors import CheckpointError
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.format import manifest
from holdfast._text import real

_RECENT = 20  # checkpoints: the state of a run may have grown since its beginning
_ANSWER_SECONDS = 1.5
_KEPT = 3  # Settings.keep_last
_RANK_DIGITS = 5


def save_seconds(folder: Path) -> float | None:
    """The longest recent time from the request of a checkpoint until it was durable."""
    layout = RunLayout(folder)
    measured = _newest(layout, "save_seconds")
    if measured is not None:
        return measured
    taken = [
        seconds
        for event in journal.read(layout.journal)
        if event.get("event") == "checkpoint"
        and (seconds := _number(event.get("seconds"))) is not None
    ]
    return max(taken[-_RECENT:], default=None)


def step_seconds(folder: Path) -> float | None:
    """The longest recent step: a stop waits for its end."""
    return _newest(RunLayout(folder), "step_seconds")


def _newest(layout: RunLayout, key: str) -> float | None:
    for attempt in reversed(layout.attempt_numbers()):
        value = _number(read_json(layout.heartbeat(attempt)).get(key))
        if value is not None:
            return value
    return None


def _number(value: Any) -> float | None:
    found = real(value)
    return found if found is not None and found >= 0 else None


@dataclass(frozen=True)
class RunNeeds:
    run_id: str | None = None
    state_bytes: int | None = None  # of all ranks: the size of one checkpoint
    host_bytes: int | None = None  # of the ranks on the fullest host: the size of one snapshot
    step: int | None = None
    kept: int = _KEPT  # checkpoints that stay
    held_bytes: int = 0  # by the checkpoints that exist
    save_seconds: float | None = None


def read_run(folder: Path) -> RunNeeds:
    """By the newest checkpoint with a valid manifest."""
    layout = RunLayout(folder)
    try:
        run_id = read_json(layout.identity).get("run_id")
        return _read(layout, str(run_id)) if run_id else RunNeeds()
    except OSError:
        return RunNeeds()


def _read(layout: RunLayout, run_id: str) -> RunNeeds:
    found: list[tuple[int, int, manifest.Manifest]] = []
    for step, attempt, path in layout.checkpoint_folders():
        with contextlib.suppress(OSError, CheckpointError):
            found.append((step, attempt, manifest.read(path)))
    kept = _KEPT
    for event in journal.read(layout.journal):
        if event.get("event") == "start":
            last, best = event.get("keep_last"), event.get("keep_best")
            kept = (last if isinstance(last, int) else _KEPT) + bool(best)
    known = RunNeeds(run_id, kept=kept, save_seconds=save_seconds(layout.folder))
    if not found:
        return known
    step, attempt, newest = found[-1]
    return replace(
        known,
        state_bytes=newest.size_bytes,
        host_bytes=_largest_host(layout, attempt, newest),
        step=step,
        held_bytes=sum(each.size_bytes for _, _, each in found),
    )


def _largest_host(layout: RunLayout, attempt: int, found: manifest.Manifest) -> int:
    """The most bytes of the ranks of one host; all of them if the hosts are not known."""
    totals: dict[str, int] = {}
    for file in found.files:
        digits = file.name.removeprefix("rank-")[:_RANK_DIGITS]
        rank = int(digits) if digits.isdigit() else 0
        keeper = read_json(layout.rank(attempt, rank)).get("keeper")
        host = keeper.get("host") if isinstance(keeper, dict) else None
        totals[str(host)] = totals.get(str(host), 0) + file.image_bytes
    return max(totals.values(), default=found.size_bytes)


def slurm_grace(environment: Mapping[str, str]) -> list[tuple[float, str]]:
    """(seconds, source) of each warning that a SLURM job gets; empty outside of a job."""
    job = find_job(environment)
    if job is None or not controller.can_ask():
        return []
    known = (
        (controller.warning_seconds(job.id, _ANSWER_SECONDS), f"--signal of job {job.id}"),
        (controller.kill_wait_seconds(_ANSWER_SECONDS), "SLURM's KillWait"),
    )
    return [(seconds, by) for seconds, by in known if seconds is not None]
