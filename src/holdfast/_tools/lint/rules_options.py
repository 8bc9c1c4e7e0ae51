"""What the #SBATCH lines themselves lose: the warning, the log or the job."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast._environment.slurm.options import options_end, parse_option_line, parse_time_limit
from holdfast._tools.lint.finding import (
    ERROR,
    HINT,
    WARNING,
    Edit,
    Finding,
    add_option,
    good_lead,
    needed_seconds,
    note,
    remove_option,
    set_value,
    signal_value,
)
from holdfast._tools.lint.job import Job
from holdfast._tools.lint.tokens import NotUnderstood, find_comments

_LATE_SECONDS = 30  # SLURM looks every 30 s
_ABSURD_LEAD_SECONDS = 15
# In small letters behind a blank it tells how to submit the script.
_LIKE_AN_OPTION = re.compile(r"(?:#\s*SBATCH|##+\s*SBATCH|#[Ss][Bb][Aa][Tt][Cc][Hh])(?=\s)")
_OPEN_VALUE = re.compile(r"[<${]")  # filled in before it is submitted
_NO_LIMIT = re.compile(r"0|-1|infinite|unlimited|partition_limit", re.I)


def check_options(job: Job) -> Iterator[Finding]:
    """All rules about options."""
    yield from check_first_line(job)
    yield from check_ignored_lines(job)
    yield from check_signal(job)
    yield from check_lead(job)
    yield from check_requeue(job)


def check_first_line(job: Job) -> Iterator[Finding]:
    if job.text.startswith("#!"):
        return
    message = (
        "the first line must begin with #! and an interpreter: sbatch refuses the script "
        '("This does not look like a batch script").'
    )
    if job.text.startswith("\ufeff"):
        message = "a byte order mark stands before the first line: sbatch refuses the script."
        edit = Edit(0, 1, "" if job.text.startswith("\ufeff#!") else "#!/bin/bash\n")
    else:
        blank = re.match(r"\s*(?=#!)", job.text)
        edit = Edit(0, 0, "#!/bin/bash\n") if blank is None else Edit(0, blank.end(), "")
    yield note(job, "shebang-missing", ERROR, 0, message, edits=[edit])


def check_ignored_lines(job: Job) -> Iterator[Finding]:
    """Lines that look like options and are none for sbatch."""
    try:
        comments = find_comments(job.text)
    except NotUnderstood:
        return
    end = options_end(job.text)
    taken = {option.name for option in job.options}
    for start in comments:
        stop = job.text.find("\n", start)
        stop = len(job.text) if stop < 0 else stop
        line = job.text[start:stop]
        match = _LIKE_AN_OPTION.match(line)
        if match is None or not re.match(r"\s+-", line[match.end() :]):
            continue
        names = {o.name for o in parse_option_line(line[match.end() :], 0, 0)}
        line_start = job.text.rfind("\n", 0, start) + 1
        is_alone = not job.text[line_start:start].strip()
        if not is_alone or not names:
            continue
        is_exact = match[0] == "#SBATCH" and line_start == start
        right = "#SBATCH" + line[match.end() :]
        if is_exact and start >= end:
            yield from _late(job, start, stop, right, names & taken)
        elif not is_exact and start < end:
            is_put_away = match[0].startswith("##") or bool(names & taken)
            yield note(
                job,
                "option-is-a-comment",
                HINT if is_put_away else WARNING,
                start,
                "sbatch takes this line for a comment, since it does not begin with #SBATCH: "
                "the option is not set.",
                edits=[] if is_put_away else [Edit(line_start, stop, right)],
                corrected=[right],
            )


def _late(job: Job, start: int, stop: int, line: str, taken: set[str]) -> Iterator[Finding]:
    edits = []
    first = job.line_of(options_end(job.text))
    if not taken:
        at = job.options_at
        edits = [Edit(at, at, line + "\n"), Edit(start, min(stop + 1, len(job.text)), "")]
    yield note(
        job,
        "option-too-late",
        ERROR,
        start,
        f"sbatch stops reading options at the first command (line {first}), and ignores this one "
        "without a word.",
        edits=edits,
        corrected=[line],
    )


def check_signal(job: Job) -> Iterator[Finding]:
    option = job.option("signal")
    if option is None:
        return
    found = job.signal
    if found is None and _OPEN_VALUE.search(option.value):
        return
    if found is None:
        asked = option.value.rpartition("@")[2]
        lead = int(asked) if re.fullmatch(r"\d{1,4}", asked) else good_lead(job) or 60
        yield note(
            job,
            "signal-unknown",
            ERROR,
            option.start,
            f'sbatch refuses --signal={option.value} ("Invalid --signal specification").',
            edits=[set_value(option, f"USR2@{lead}")],
        )
    elif found.name in ("KILL", "STOP"):
        yield note(
            job,
            "signal-cannot-be-caught",
            ERROR,
            option.start,
            f"SIG{found.name} cannot be caught: it ends or halts the training {found.seconds} to "
            f"{found.seconds + _LATE_SECONDS} s before the limit, and nothing is saved.",
            edits=[set_value(option, f"USR2@{found.seconds}")],
        )


def check_lead(job: Job) -> Iterator[Finding]:
    """Whether the warning leaves time to save, and comes at all."""
    time = job.option("time")
    if time is not None and parse_time_limit(time.value) is None:
        if not _NO_LIMIT.fullmatch(time.value) and not _OPEN_VALUE.search(time.value):
            yield note(
                job,
                "time-unknown",
                ERROR,
                time.start,
                f'sbatch refuses --time={time.value} ("Invalid --time specification"): it takes '
                "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS.",
                corrected=["#SBATCH --time=8:00:00"],
            )
        return
    if time is None and job.is_training and job.options:
        at = job.option("signal")
        yield note(
            job,
            "time-missing",
            HINT,
            0 if at is None else at.start,
            "there is no --time: the limit is whatever the partition has, and may be a few "
            "minutes.",
            corrected=["#SBATCH --time=8:00:00"],
        )
    option, found = job.option("signal"), job.signal
    if option is None or found is None:
        return
    limit, lead, needed = job.limit_seconds, found.seconds, needed_seconds(job)
    better = good_lead(job)
    change = []
    if better is not None and better != lead:
        change = [set_value(option, signal_value(job, to_batch=found.to_batch, seconds=better))]
    if limit is not None and lead >= limit - _LATE_SECONDS:
        yield note(
            job,
            "lead-too-long",
            WARNING,
            option.start,
            f"SLURM sends the signal {lead} to {lead + _LATE_SECONDS} s before the end, and the "
            f"limit is {limit:.0f} s: it can fire before the training is there, and is never sent "
            "again.",
            edits=change,
        )
    elif needed is not None and lead < needed:
        yield note(
            job,
            "lead-too-short",
            ERROR,
            option.start,
            f"{lead} s are too short: {_describe_need(job)}, so that the training is killed "
            "before its state is safe.",
            edits=change,
        )
    elif needed is None and lead < _ABSURD_LEAD_SECONDS:
        yield note(
            job,
            "lead-too-short",
            WARNING,
            option.start,
            f"{lead} s leave no time to end a step and to write a checkpoint before SIGTERM comes.",
            edits=change,
        )


def _describe_need(job: Job) -> str:
    assert job.save_seconds is not None
    where = f" of {job.run_name}" if job.run_name else ""
    told = f"a save{where} took up to {job.save_seconds:.3g} s"
    if job.step_seconds is not None:
        told += f", after a step of up to {job.step_seconds:.3g} s"
    return told


def check_requeue(job: Job) -> Iterator[Finding]:
    """Whether the job comes back, and its log with it."""
    refused, wanted = job.option("no-requeue"), job.option("requeue")
    is_refused = refused is not None and (wanted is None or wanted.start < refused.start)
    # Without any option in the script, they are on the command line; who submits a job of its
    # own does not need this one back.
    expects_return = job.is_training and bool(job.options) and not job.is_resubmitted
    if is_refused and expects_return:
        assert refused is not None
        edits = [remove_option(job, refused)]
        if wanted is None:
            edits = [Edit(refused.start, refused.end, "--requeue")]
        yield note(
            job,
            "requeue-refused",
            WARNING,
            refused.start,
            "with --no-requeue the job is gone after a preemption, a node failure or "
            "`scontrol requeue`: it never starts again.",
            edits=edits,
        )
    elif wanted is None and not is_refused and expects_return:
        yield note(
            job,
            "requeue-missing",
            WARNING,
            max(0, job.options_at - 1),
            "without --requeue it is the site's setting (JobRequeue) whether the job comes back "
            "after a preemption or a node failure, or is lost.",
            edits=[add_option(job, "--requeue")],
        )
    mode, output = job.option("open-mode"), job.option("output")
    if is_refused or (wanted is None and not expects_return):
        return
    if output is not None and output.value == "/dev/null":
        return
    name = "slurm-%j.out" if output is None else output.value
    truncates = "a job that is requeued begins its log anew: what the attempts before wrote to "
    if mode is None:
        yield note(
            job,
            "log-truncated",
            WARNING,
            max(0, job.options_at - 1) if output is None else output.start,
            f"{truncates}{name} is lost.",
            edits=[add_option(job, "--open-mode=append")],
        )
    elif not "append".startswith(mode.value.lower() or "?"):
        yield note(
            job,
            "log-truncated",
            WARNING,
            mode.start,
            f"{truncates}{name} is lost.",
            edits=[set_value(mode, "append")],
        )
