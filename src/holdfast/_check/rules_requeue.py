"""A job that calls itself back: too many of it, or more often than anyone wants."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast._check.finding import ERROR, WARNING, Edit, Finding
from holdfast._check.job import Job, Trap
from holdfast._check.noting import note
from holdfast._check.rules_trap import submits
from holdfast._check.shell import Command

_REQUEUE = re.compile(
    r"scontrol\s+requeue\s+[\\\"']*"
    r"(\$\{SLURM_(?:ARRAY_JOB_ID|JOB_?ID)\}|\$SLURM_(?:ARRAY_JOB_ID|JOB_?ID)\b)"
)
_ASKS = re.compile(r"scontrol\s+(-o\s+)?show|squeue|sacct|\bif\b|\[\[?\s|\btest\b|&&|\|\||\bcase\b")
_TASK = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"


def check_requeueing(job: Job) -> Iterator[Finding]:
    """All rules about `scontrol requeue`."""
    if not job.is_understood:
        return
    if job.option("array") is not None:
        yield from check_array(job)
    for trap in job.traps:
        if "scontrol requeue" in re.sub(r"\s+", " ", trap.handler) or submits(trap):
            yield from check_trap(job, trap)
    yield from check_unconditional(job)


def check_array(job: Job) -> Iterator[Finding]:
    for command in job.commands:
        written = job.text[command.start : command.end]
        for match in _REQUEUE.finditer(written):
            if written[match.end() :].startswith("_"):
                continue
            start, end = command.start + match.start(1), command.start + match.end(1)
            yield note(
                job,
                "requeue-whole-array",
                ERROR,
                start,
                "in the task whose job id is the array's, this requeues all tasks of the array, "
                "also those that run well.",
                edits=[Edit(start, end, _escaped(job, start, _TASK))],
            )


def _escaped(job: Job, at: int, text: str) -> str:
    return text.replace("$", "\\$") if job.text[at - 1] == "\\" else text


def check_trap(job: Job, trap: Trap) -> Iterator[Finding]:
    """scancel sends SIGTERM, too, and every end passes EXIT."""
    dangerous = [name for name in trap.signals if name in ("TERM", "EXIT", "INT")]
    if not dangerous or _ASKS.search(trap.handler):
        return
    words = trap.command.words
    keeps = [w for w, name in zip(words[-len(trap.signals) :], trap.signals, strict=True)
             if name not in dangerous]  # fmt: skip
    edits = []
    does_submit = submits(trap)
    is_warning = job.signal is not None and job.signal.name in dangerous
    if keeps and not does_submit and not is_warning:  # what else it is for is not known here
        edits = [
            Edit(words[-len(trap.signals)].start, words[-1].end, " ".join(w.text for w in keeps))
        ]
    what = "every end of the script" if "EXIT" in dangerous else "SIGTERM"
    why = (
        "also a training that is done starts again, for ever"
        if "EXIT" in dangerous
        else "scancel sends it too, and the job comes back: nobody can cancel it"
    )
    yield note(
        job,
        "requeue-after-cancel",
        ERROR,
        trap.command.start,
        f"{what} {'submits' if does_submit else 'requeues'} the job here: {why}.",
        edits=edits,
        corrected=[] if edits else [
            'scontrol show job -o "$SLURM_JOB_ID" | grep -qE "Reason=TimeLimit|PreemptTime=2" && '
            + ("sbatch …" if does_submit else 'scontrol requeue "$SLURM_JOB_ID"')
        ],
    )  # fmt: skip


def check_unconditional(job: Job) -> Iterator[Finding]:
    """A requeue at the end of the script that nothing stands before."""
    for command in job.commands:
        if command.text != "scontrol" or command.function is not None or command.is_conditional:
            continue
        if len(command.words) > 1 and command.words[1].text == "requeue" and not _may_leave(
            job, command
        ):  # fmt: skip
            yield note(
                job,
                "requeue-always",
                WARNING,
                command.start,
                "the script comes here however the training ended: one that is done starts again, "
                "for ever.",
                corrected=[
                    "status=$?   (right behind the training)",
                    f"[ $status -eq 75 ] && {job.text[command.start : command.end]}",
                ],
            )


def _may_leave(job: Job, command: Command) -> bool:
    """Whether something before may have ended the script."""
    before = [each for each in job.commands if each.start < command.start]
    return any(
        each.text in ("exit", "return") or each.text == "exec" or
        (each.text == "set" and any("e" in w.text for w in each.words[1:]))
        for each in before
    )  # fmt: skip
