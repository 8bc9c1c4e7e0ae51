"""A run in one sentence, and what a person should know of it now."""

from __future__ import annotations

from pathlib import Path

from holdfast._status import words
from holdfast._status.gather import RunSummary
from holdfast._status.held import describe_disturbed, describe_paused, describe_stuck
from holdfast._status.job import describe_job
from holdfast._status.ranks import describe_death, describe_straggler

_SOON_SECONDS = 600.0  # until the job ends


def headline_of(run: RunSummary, how: str = "") -> str:
    """How it does, in a sentence; `how` is what is known of its end."""
    step = "" if run.step is None else f"step {run.step:,}"
    if step and run.total:
        done = min(run.step or 0, run.total) * 100 // run.total  # 100 only at the end
        step += f" of {run.total:,} ({done}%)"
    if run.epoch and run.epochs:
        step = f"epoch {run.epoch} of {run.epochs}, {step}"
    state = run.state[:1].upper() + run.state[1:]
    if run.is_live:
        return f"{state}: {step}." if step else f"{state}."
    found = f"{state} at {step}" if step else state
    return (
        f"{found}. {_sentence(how)}"
        if how and run.state not in ("finished", "new")
        else f"{found}."
    )


def warnings_of(run: RunSummary) -> list[str]:
    """Sentences, the worst first."""
    folder = Path(run.folder)
    found = [
        describe_stuck(run.stuck, folder),
        *(f"{describe_death(each)}." for each in run.deaths[:3]),
        describe_paused(run.paused, has_ranks=bool(run.ranks)),
        _unsafe(run),
        _told("slowed ", describe_disturbed(run.disturbed)),
        _told("", describe_straggler(run.straggler)),
        _time_left(run),
        _requeue(run),
    ]
    return [_sentence(each) for each in found if each]


def job_text(run: RunSummary) -> str:
    """What is known of its job, in a line."""
    return describe_job(run.job, is_live=run.is_live)


def _unsafe(run: RunSummary) -> str:
    if not run.is_live or run.state == "starting":
        return ""
    if run.slots is None and run.disk_step is None:
        return "nothing is safe yet: neither a snapshot nor a checkpoint has been made"
    if run.in_shm is False:
        return (
            "/dev/shm is too small for snapshots, so they are lost if trainer and keeper are both "
            "killed"
        )
    return ""


def _time_left(run: RunSummary) -> str:
    job = run.job
    if job is None or job.seconds_left is None or job.seconds_left > _SOON_SECONDS:
        return ""
    return f"job {job.id} ends in {words.duration(job.seconds_left)}"


def _requeue(run: RunSummary) -> str:
    return run.job.requeue or "" if run.job is not None and not run.is_live else ""


def _told(before: str, found: str) -> str:
    return f"{before}{found}" if found else ""


def _sentence(found: str) -> str:
    shown = found[:1].upper() + found[1:]
    return shown if shown.endswith((".", "!", "?", "…")) else f"{shown}."
