"""Traps of the batch shell, jobs that requeue themselves, and scripts that lint cannot judge."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast._environment.slurm.options import Option, WarningSignal
from holdfast._tools.lint.finding import (
    ERROR,
    HINT,
    NOT_UNDERSTOOD,
    WARNING,
    Edit,
    LintFinding,
    report,
    set_value,
    signal_value,
    whole_lines,
)
from holdfast._tools.lint.job import BatchScript, Trap
from holdfast._tools.lint.shell import Command

# -- Traps that never run, and one that is missing -------------------------------------------------


_ONLY_WORDS = frozenset(["echo", "printf", "date", "exit", "sleep", "true", ":", "logger", "sync"])
_SUBMITS = re.compile(r"(?:^|[;&|({\n]|\b(?:then|else|do|if)\s)\s*sbatch\b")


def check_traps(job: BatchScript) -> Iterator[LintFinding]:
    """All rules about traps that do not depend on what the shell waits for."""
    if not job.is_understood:
        return
    option, warning = job.option("signal"), job.signal
    if option is not None and warning is not None and not warning.to_batch:
        traps = [trap for trap in job.traps if warning.name in trap.signals and not trap.ignores]
        if traps and job.trainings and does_anything(traps[-1]):
            yield _never_runs(job, traps[-1], option, warning)
    yield from _check_missing_trap(job)


def does_anything(trap: Trap) -> bool:
    """Whether the handler does more than print."""
    return any(name not in _ONLY_WORDS for name in _programs(trap.handler))


def submits(trap: Trap) -> bool:
    """Whether the handler submits a job itself."""
    return _SUBMITS.search(trap.handler) is not None


def _programs(handler: str) -> list[str]:
    commands = re.split(r"[;\n&|]+", handler)
    names = [each.split()[0] for each in commands if each.split()]
    return [name for name in names if not name.startswith("#")]


def _never_runs(
    job: BatchScript, trap: Trap, option: Option, warning: WarningSignal
) -> LintFinding:
    text = (
        f"this trap never runs: without B: SIG{warning.name} goes to the tasks of srun only, not "
    )
    severity = WARNING if all(launch.is_step for launch in job.trainings) else ERROR
    edits: list[Edit] = []
    if any(launch.is_led or job.uses_holdfast(launch) for launch in job.trainings):
        # With B: and a wait it would run, and requeue the job before the state is saved.
        text += "to bash. It is not needed either: holdfast requeues the job by itself, once "
        text += "the state is saved."
        lines = ["(without this trap; what else it does belongs behind the training)"]
        if _only_requeues(job, trap):
            edits, lines = [_without(job, trap)], ["(without this trap)"]
    else:
        text += "to bash."
        right = signal_value(option, warning, to_batch=True)
        lines = [f"#SBATCH --signal={right}", "… &", "wait || wait"]
        if all(launch.command.is_background for launch in job.trainings):
            edits, lines = [set_value(option, right)], []
    at = trap.command.start
    return report(job, "trap-never-runs", severity, at, text, edits=edits, corrected=lines)


def _only_requeues(job: BatchScript, trap: Trap) -> bool:
    """Whether nothing is missed without the handler: the training receives the signal itself."""
    rest = re.sub(r"scontrol\s+requeue\b[^;&|\n]*", "", trap.handler)
    functions = {command.function for command in job.commands}  # their text is in the handler
    return not set(_programs(rest)) - _ONLY_WORDS - {"kill", "wait"} - functions


def _without(job: BatchScript, trap: Trap) -> Edit:
    """Without the trap; without its line if nothing else is there."""
    command = trap.command
    start, end = whole_lines(job.text, command.start, command.end)
    around = job.text[start : command.start] + job.text[command.end : end]
    if command.within or command.before in ("&&", "||") or around.strip():
        return Edit(command.start, command.end, ":")
    return Edit(start, end, "")


def _check_missing_trap(job: BatchScript) -> Iterator[LintFinding]:
    """bash dies of the SIGTERM at the limit, and with it srun, which prints for the tasks."""
    if any("TERM" in trap.signals for trap in job.traps):
        return
    for launch in job.trainings:
        command = launch.command
        if not launch.is_step or launch.is_exec or command.is_background:
            continue
        if not (launch.is_led or job.uses_holdfast(launch)):
            continue
        # With a trap, commands behind the training would also run after an interruption.
        if any(c.start > command.end and c.text not in _ONLY_WORDS for c in job.commands):
            continue
        text = (
            "at the limit, or when SLURM requeues the job, bash dies of SIGTERM and srun with it: "
            "the state is saved, but the last lines of the log are lost."
        )
        right = ["trap : TERM   (in a line before it)"]
        yield report(job, "trap-missing", HINT, command.start, text, corrected=right)
        return


# -- `scontrol requeue`: too many jobs of it, or too often -----------------------------------------


_REQUEUE = re.compile(
    r"scontrol\s+requeue\s+[\\\"']*"
    r"(\$\{SLURM_(?:ARRAY_JOB_ID|JOB_?ID)\}|\$SLURM_(?:ARRAY_JOB_ID|JOB_?ID)\b)"
)
_ASKS = re.compile(r"scontrol\s+(-o\s+)?show|squeue|sacct|\bif\b|\[\[?\s|\btest\b|&&|\|\||\bcase\b")
_TASK = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"


def check_requeueing(job: BatchScript) -> Iterator[LintFinding]:
    """All rules about `scontrol requeue`."""
    if not job.is_understood:
        return
    if job.option("array") is not None:
        yield from _check_array(job)
    for trap in job.traps:
        if "scontrol requeue" in re.sub(r"\s+", " ", trap.handler) or submits(trap):
            yield from _check_trap(job, trap)
    yield from _check_unconditional(job)


def _check_array(job: BatchScript) -> Iterator[LintFinding]:
    text = (
        "in the task whose job id is the array's, this requeues all tasks of the array, "
        "also those that run well."
    )
    for command in job.commands:
        written = job.text[command.start : command.end]
        for match in _REQUEUE.finditer(written):
            if written[match.end() :].startswith("_"):
                continue
            start, end = command.start + match.start(1), command.start + match.end(1)
            is_escaped = job.text[start - 1] == "\\"
            task = _TASK.replace("$", "\\$") if is_escaped else _TASK
            edits = [Edit(start, end, task)]
            yield report(job, "requeue-whole-array", ERROR, start, text, edits=edits)


def _check_trap(job: BatchScript, trap: Trap) -> Iterator[LintFinding]:
    """scancel sends SIGTERM, too, and every end of a script passes EXIT."""
    dangerous = [name for name in trap.signals if name in ("TERM", "EXIT", "INT")]
    if not dangerous or _ASKS.search(trap.handler):
        return
    does_submit = submits(trap)
    again = "sbatch …" if does_submit else 'scontrol requeue "$SLURM_JOB_ID"'
    asks = 'scontrol show job -o "$SLURM_JOB_ID" | grep -qE "Reason=TimeLimit|PreemptTime=2"'
    edits, lines = [], [f"{asks} && {again}"]
    words = trap.command.words[-len(trap.signals) :]
    keeps = [w.text for w, name in zip(words, trap.signals, strict=True) if name not in dangerous]
    is_warning = job.signal is not None and job.signal.name in dangerous
    if keeps and not does_submit and not is_warning:  # else its other purpose is not known
        edits, lines = [Edit(words[0].start, words[-1].end, " ".join(keeps))], []
    what = "every end of the script" if "EXIT" in dangerous else "SIGTERM"
    why = (
        "also a training that is done starts again, for ever"
        if "EXIT" in dangerous
        else "scancel sends it too, and the job comes back: it cannot be cancelled"
    )
    text = f"{what} {'submits' if does_submit else 'requeues'} the job here: {why}."
    at = trap.command.start
    yield report(job, "requeue-after-cancel", ERROR, at, text, edits=edits, corrected=lines)


def _check_unconditional(job: BatchScript) -> Iterator[LintFinding]:
    """A requeue at the end of the script without a condition."""
    for command in job.commands:
        if command.text != "scontrol" or command.function is not None or command.is_conditional:
            continue
        if [word.text for word in command.words[1:2]] != ["requeue"] or _may_leave(job, command):
            continue
        text = (
            "the script comes here however the training ended: one that is done starts again, "
            "for ever."
        )
        corrected = [
            "status=$?   (right behind the training)",
            f"[ $status -eq 75 ] && {job.text[command.start : command.end]}",
        ]
        yield report(job, "requeue-always", WARNING, command.start, text, corrected=corrected)


def _may_leave(job: BatchScript, command: Command) -> bool:
    """Whether an earlier command may have ended the script."""
    return any(
        each.text in ("exit", "return", "exec")
        or (each.text == "set" and any("e" in word.text for word in each.words[1:]))
        for each in job.commands
        if each.start < command.start
    )


# -- What lint cannot judge: said, since silence would read as a good script -----------------------


_TEMPLATE = re.compile(r"^[ \t]*(?:\{%.*|\{\{.*\}\}[ \t]*)$", re.MULTILINE)


def is_template(text: str) -> bool:
    """Whether whole lines are still to be filled in."""
    return _TEMPLATE.search(text) is not None


def check_understood(job: BatchScript) -> Iterator[LintFinding]:
    """One hint, if no training was found and a command could be one."""
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


def check_template(job: BatchScript) -> Iterator[LintFinding]:
    """The only rule for a template: its final text is not known."""
    match = _TEMPLATE.search(job.text)
    assert match is not None
    yield _hint(job, match.start(), "this is a template, not yet a script.")


def _hint(job: BatchScript, at: int, fact: str) -> LintFinding:
    text = f"{fact} Whether the warning reaches the training is not known."
    right = ["holdfast doctor -- bash SCRIPT   (in an allocation: it sends the signals)"]
    return report(job, NOT_UNDERSTOOD, HINT, at, text, corrected=right)
