"""A job that calls itself back: too many of it, or more often than anyone wants."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast._tools.lint.finding import (
    ERROR,
    HINT,
    NOT_UNDERSTOOD,
    WARNING,
    Edit,
    Finding,
    note,
    set_value,
    signal_value,
)
from holdfast._tools.lint.job import Job, Trap
from holdfast._tools.lint.shell import Command

# -- Traps of the batch shell that never run, and one that is missing ------------------------------


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


# -- What lint cannot judge: said, since silence would read as a good script -----------------------


_TEMPLATE = re.compile(r"^[ \t]*(?:\{%.*|\{\{.*\}\}[ \t]*)$", re.MULTILINE)


def is_template(text: str) -> bool:
    """Whether whole lines are still to be filled in, so that nothing in it is final."""
    return _TEMPLATE.search(text) is not None


def check_understood(job: Job) -> Iterator[Finding]:
    """One hint, where no training was found and something could be one."""
    if job.is_python:
        return
    if not job.is_understood:
        yield _hint(job, 0, "lint could only read the #SBATCH lines.")
        return
    for launch in job.unseen[-1:]:
        command = launch.command
        written = re.sub(r"\s*\\?\n\s*", " ", job.text[command.start : command.end])
        name = written if len(written) <= 40 else f"{written[:40]}…"
        yield _hint(job, command.start, f"lint cannot see what `{name}` starts.")


def check_template(job: Job) -> Iterator[Finding]:
    """Of a template nothing else is said: what it becomes is not known."""
    match = _TEMPLATE.search(job.text)
    assert match is not None
    yield _hint(job, match.start(), "this is a template, not yet a script.")


def _hint(job: Job, at: int, fact: str) -> Finding:
    return note(
        job,
        NOT_UNDERSTOOD,
        HINT,
        at,
        f"{fact} Whether the warning reaches the training is not known.",
        corrected=["holdfast doctor -- bash SCRIPT   (in an allocation: it sends the signals)"],
    )
