"""Traps of the batch shell that never run, and one that is missing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast._check.finding import ERROR, HINT, WARNING, Edit, Finding
from holdfast._check.job import Job, Trap
from holdfast._check.noting import note, set_value, signal_value

_ONLY_WORDS = frozenset(["echo", "printf", "date", "exit", "sleep", "true", ":", "logger", "sync"])

_SUBMITS = re.compile(r"(?:^|[;&|({\n]|\b(?:then|else|do|if)\s)\s*sbatch\b")


def check_traps(job: Job) -> Iterator[Finding]:
    """All rules about traps for which it does not matter what they wait for."""
    if not job.is_understood:
        return
    found = job.signal
    if found is not None and not found.to_batch:
        traps = [trap for trap in job.traps if found.name in trap.signals and not trap.ignores]
        if traps and job.trainings and does_anything(traps[-1]):
            yield from _never_runs(job, traps[-1])
    yield from check_missing_trap(job)


def does_anything(trap: Trap) -> bool:
    """Whether the handler does more than to say something."""
    return any(name not in _ONLY_WORDS for name in _programs(trap.handler))


def submits(trap: Trap) -> bool:
    """Whether the handler hands in a job itself."""
    return _SUBMITS.search(trap.handler) is not None


def _programs(handler: str) -> list[str]:
    commands = re.split(r"[;\n&|]+", handler)
    names = [each.split()[0] for each in commands if each.split()]
    return [name for name in names if not name.startswith("#")]


def _never_runs(job: Job, trap: Trap) -> Iterator[Finding]:
    found, option = job.signal, job.option("signal")
    assert found is not None
    assert option is not None
    fact = f"this trap never runs: without B: SIG{found.name} goes to the tasks of srun only, not "
    severity = WARNING if all(launch.is_step for launch in job.trainings) else ERROR
    start = trap.command.start
    if any(launch.is_led or job.uses_holdfast(launch) for launch in job.trainings):
        # With B: and a wait it would run, and requeue the job before the state is saved.
        is_only_that = _only_requeues(job, trap)
        yield note(
            job,
            "trap-never-runs",
            severity,
            start,
            f"{fact}to bash. It is not needed either: holdfast requeues the job by itself, once "
            "the state is saved.",
            edits=[_without(job, trap)] if is_only_that else [],
            corrected=[
                "(without this trap)"
                if is_only_that
                else "(without this trap; what else it does belongs behind the training)"
            ],
        )
        return
    is_prepared = all(launch.command.is_background for launch in job.trainings)
    right = signal_value(job, to_batch=True)
    yield note(
        job,
        "trap-never-runs",
        severity,
        start,
        f"{fact}to bash.",
        edits=[set_value(option, right)] if is_prepared else [],
        corrected=() if is_prepared else (f"#SBATCH --signal={right}", "… &", "wait || wait"),
    )


def _only_requeues(job: Job, trap: Trap) -> bool:
    """Whether the handler does nothing that would be missed: the training hears by itself."""
    rest = re.sub(r"scontrol\s+requeue\b[^;&|\n]*", "", trap.handler)
    functions = {command.function for command in job.commands}  # their text is in the handler
    return not set(_programs(rest)) - _ONLY_WORDS - {"kill", "wait"} - functions


def _without(job: Job, trap: Trap) -> Edit:
    """Without the trap; without its line if nothing else stands there."""
    command = trap.command
    start = job.text.rfind("\n", 0, command.start) + 1
    end = job.text.find("\n", command.end)
    end = len(job.text) if end < 0 else end + 1
    around = job.text[start : command.start] + job.text[command.end : end]
    if command.within or command.before in ("&&", "||") or around.strip():
        return Edit(command.start, command.end, ":")
    return Edit(start, end, "")


def check_missing_trap(job: Job) -> Iterator[Finding]:
    """bash dies of the SIGTERM at the limit, and srun, which prints for the tasks, with it."""
    if any("TERM" in trap.signals for trap in job.traps):
        return
    for launch in job.trainings:
        command = launch.command
        if not launch.is_step or launch.is_exec or command.is_background:
            continue
        if not (launch.is_led or job.uses_holdfast(launch)):
            continue
        # What comes behind the training would be done after an interruption, too.
        if any(c.start > command.end and c.text not in _ONLY_WORDS for c in job.commands):
            continue
        yield note(
            job,
            "trap-missing",
            HINT,
            command.start,
            "at the limit, or when SLURM requeues the job, bash dies of SIGTERM and srun with it: "
            "the state is saved all the same, but the last lines of the log are lost.",
            corrected=["trap : TERM   (in a line before it)"],
        )
        return
