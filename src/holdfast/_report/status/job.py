"""The SLURM job and the mirror of a run, by its records: neither SLURM nor the mirror is asked."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from holdfast import _text
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout


@dataclass(frozen=True, slots=True)
class JobSummary:
    """One job of SLURM, at one moment."""

    id: str
    restarts: int
    seconds_left: float | None  # None: it is over, has no limit, or SLURM did not say
    warning_seconds: float | None  # None: its script asks for none
    step_seconds: float | None  # measured: the slowest recent one
    save_seconds: float | None
    requeue: str | None  # whether it was requeued when the last attempt was interrupted


def read_job(
    layout: RunLayout, attempt: int, beat: dict[str, Any], live: bool
) -> JobSummary | None:
    """From the heartbeat of the keeper, and from its record at the end."""
    found = _text.record(beat.get("slurm"))
    if not isinstance(found.get("job"), str):
        return None
    end = _text.real(found.get("end"))
    said = read_json(layout.requeue(attempt)).get("said")
    return JobSummary(
        id=found["job"],
        restarts=int(_text.real(found.get("restarts")) or 0),
        seconds_left=max(0.0, end - time.time()) if live and end is not None else None,
        warning_seconds=_text.real(found.get("warning_seconds")),
        step_seconds=_text.real(beat.get("step_seconds")),
        save_seconds=_text.real(beat.get("save_seconds")),
        requeue=said if isinstance(said, str) and not live else None,
    )


def describe_job(job: JobSummary | None, *, is_live: bool) -> str:
    if job is None:
        return ""
    text = f"job {job.id}"
    if job.restarts:
        text += f", restarted {_text.count(job.restarts, 'time')}"
    if not is_live:
        return text
    if job.seconds_left is not None:
        text += f", {_text.duration(job.seconds_left)} left"
    return f"{text}; {_describe_warning(job)}"


def _describe_warning(job: JobSummary) -> str:
    needed = (job.step_seconds or 0.0) + (job.save_seconds or 0.0)
    takes = "no save has been measured yet"
    if job.save_seconds is not None:
        takes = f"a step and its save take {_text.duration(needed)}"
    if job.warning_seconds is None:
        return f"its script has no line with --signal; {takes}"
    text = f"SLURM warns {_text.duration(job.warning_seconds)} before the end; {takes}"
    if job.save_seconds is not None and needed > job.warning_seconds:
        return f"{text}: ask for --signal=USR2@{2 * needed + 30:.0f}"
    return text


@dataclass(frozen=True, slots=True)
class MirrorSummary:
    """A mirror as the process that copies to it has last recorded."""

    address: str
    step: int | None  # the newest there
    age_seconds: float | None  # of that checkpoint
    count: int
    copying_step: int | None
    copied_bytes: int | None
    copying_bytes: int | None
    trouble: str | None


def read_mirror(layout: RunLayout) -> MirrorSummary | None:
    """None if the run has none, or never had."""
    record = read_json(layout.mirror)
    address = record.get("address")
    if not isinstance(address, str):
        return None
    held = _text.records(record.get("checkpoints"))
    copying = _text.record(record.get("under_way"))
    saved_at = record.get("newest_saved_at")
    return MirrorSummary(
        address=address,
        step=held[-1].get("step") if held else None,
        age_seconds=max(0.0, time.time() - saved_at) if isinstance(saved_at, float) else None,
        count=len(held),
        copying_step=copying.get("step"),
        copied_bytes=copying.get("done_bytes"),
        copying_bytes=copying.get("total_bytes"),
        trouble=record.get("trouble") or None,
    )


def describe_mirror(mirror: MirrorSummary | None) -> str:
    if mirror is None:
        return ""
    text = "nothing yet"
    if mirror.step is not None:
        text = f"step {mirror.step}"
        if mirror.age_seconds is not None:
            text += f", {_text.duration(mirror.age_seconds)} old"
        text += f" ({_text.count(mirror.count, 'checkpoint')})"
    text += f" in {_text.name(mirror.address)}"
    if mirror.trouble:
        trouble = mirror.trouble.partition("\n")[0].removeprefix(f"{mirror.address}: ")
        return f"{text}; {_text.name(trouble)}"
    if mirror.copying_step is not None and mirror.copied_bytes is not None:
        text += f"; copying step {mirror.copying_step}: {_text.size(mirror.copied_bytes)}"
        if mirror.copying_bytes is not None:
            text += f" of {_text.size(mirror.copying_bytes)}"
    return text
