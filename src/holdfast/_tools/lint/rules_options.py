"""What the #SBATCH lines themselves lose: the warning, the log or the job."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast._environment.slurm.options import (
    WarningSignal,
    options_end,
    parse_option_line,
    parse_time_limit,
)
from holdfast._tools.lint.finding import (
    ERROR,
    HINT,
    SLACK_SECONDS,
    WARNING,
    Edit,
    LintFinding,
    add_option,
    good_lead,
    needed_seconds,
    remove_option,
    report,
    set_value,
    signal_value,
)
from holdfast._tools.lint.job import BatchScript
from holdfast._tools.lint.shell import NotUnderstood, find_comments

_ABSURD_LEAD_SECONDS = 15
# In lower case behind a blank it is prose: how to submit the script.
_LIKE_AN_OPTION = re.compile(r"(?:#\s*SBATCH|##+\s*SBATCH|#[Ss][Bb][Aa][Tt][Cc][Hh])(?=\s)")
_OPEN_VALUE = re.compile(r"[<${]")  # filled in before it is submitted
_NO_LIMIT = re.compile(r"0|-1|infinite|unlimited|partition_limit", re.I)


def check_options(job: BatchScript) -> Iterator[LintFinding]:
    """All rules about options."""
    yield from _check_first_line(job)
    yield from _check_ignored_lines(job)
    yield from _check_signal(job)
    yield from _check_lead(job)
    yield from _check_requeue(job)


def _check_first_line(job: BatchScript) -> Iterator[LintFinding]:
    if job.text.startswith("#!"):
        return
    text = (
        "the first line must begin with #! and an interpreter: sbatch refuses the script "
        '("This does not look like a batch script").'
    )
    if job.text.startswith("\ufeff"):
        text = "a byte order mark stands before the first line: sbatch refuses the script."
        edit = Edit(0, 1, "" if job.text.startswith("\ufeff#!") else "#!/bin/bash\n")
    else:
        blank = re.match(r"\s*(?=#!)", job.text)
        edit = Edit(0, 0, "#!/bin/bash\n") if blank is None else Edit(0, blank.end(), "")
    yield report(job, "shebang-missing", ERROR, 0, text, edits=[edit])


def _check_ignored_lines(job: BatchScript) -> Iterator[LintFinding]:
    """Lines that look like options, and are none for sbatch."""
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
        edits: list[Edit] = []
        if is_exact and start >= end:
            if not names & taken:
                at = job.options_at
                edits = [Edit(at, at, right + "\n"), Edit(start, min(stop + 1, len(job.text)), "")]
            text = (
                f"sbatch stops reading options at the first command (line {job.line_of(end)}), and "
                "ignores this one without a word."
            )
            yield report(job, "option-too-late", ERROR, start, text, edits=edits, corrected=[right])
        elif not is_exact and start < end:
            is_put_away = match[0].startswith("##") or bool(names & taken)
            severity = HINT if is_put_away else WARNING
            edits = [] if is_put_away else [Edit(line_start, stop, right)]
            text = (
                "sbatch takes this line for a comment, since it does not begin with #SBATCH: "
                "the option is not set."
            )
            yield report(
                job, "option-is-a-comment", severity, start, text, edits=edits, corrected=[right]
            )


def _check_signal(job: BatchScript) -> Iterator[LintFinding]:
    option, warning = job.option("signal"), job.signal
    if option is None or (warning is None and _OPEN_VALUE.search(option.value)):
        return
    if warning is None:
        asked = option.value.rpartition("@")[2]
        lead = int(asked) if re.fullmatch(r"\d{1,4}", asked) else good_lead(job) or 60
        text = f'sbatch refuses --signal={option.value} ("Invalid --signal specification").'
        edits = [set_value(option, f"USR2@{lead}")]
        yield report(job, "signal-unknown", ERROR, option.start, text, edits=edits)
    elif warning.name in ("KILL", "STOP"):
        seconds = warning.seconds
        text = (
            f"SIG{warning.name} cannot be caught: it ends or halts the training {seconds} to "
            f"{seconds + SLACK_SECONDS} s before the limit, and nothing is saved."
        )
        edits = [set_value(option, f"USR2@{seconds}")]
        yield report(job, "signal-cannot-be-caught", ERROR, option.start, text, edits=edits)


def _check_lead(job: BatchScript) -> Iterator[LintFinding]:
    """Whether the warning leaves time to save, and comes at all."""
    time, option, warning = job.option("time"), job.option("signal"), job.signal
    example = ["#SBATCH --time=8:00:00"]
    if time is not None and parse_time_limit(time.value) is None:
        if not _NO_LIMIT.fullmatch(time.value) and not _OPEN_VALUE.search(time.value):
            text = (
                f'sbatch refuses --time={time.value} ("Invalid --time specification"): it takes '
                "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."
            )
            yield report(job, "time-unknown", ERROR, time.start, text, corrected=example)
        return
    if time is None and job.is_training and job.options:
        text = "there is no --time: the limit is whatever the partition has, and may be a few "
        at = 0 if option is None else option.start
        yield report(job, "time-missing", HINT, at, f"{text}minutes.", corrected=example)
    if option is None or warning is None:
        return
    limit, lead, needed = job.limit_seconds, warning.seconds, needed_seconds(job)
    better = good_lead(job)
    edits = []
    if better is not None and better != lead:
        other = WarningSignal(warning.name, better, warning.to_batch)
        edits = [set_value(option, signal_value(option, other, to_batch=warning.to_batch))]
    if limit is not None and lead >= limit - SLACK_SECONDS:
        text = (
            f"SLURM sends the signal {lead} to {lead + SLACK_SECONDS} s before the end, and the "
            f"limit is {limit:.0f} s: it can fire before the training is there, and is never sent "
            "again."
        )
        yield report(job, "lead-too-long", WARNING, option.start, text, edits=edits)
    elif needed is not None and lead < needed:
        text = (
            f"{lead} s are too short: {_describe_need(job)}, so that the training is killed "
            "before its state is safe."
        )
        yield report(job, "lead-too-short", ERROR, option.start, text, edits=edits)
    elif needed is None and lead < _ABSURD_LEAD_SECONDS:
        text = f"{lead} s leave no time to end a step and to write a checkpoint before SIGTERM "
        yield report(job, "lead-too-short", WARNING, option.start, f"{text}comes.", edits=edits)


def _describe_need(job: BatchScript) -> str:
    assert job.save_seconds is not None
    where = f" of {job.run_name}" if job.run_name else ""
    text = f"a save{where} took up to {job.save_seconds:.3g} s"
    if job.step_seconds is not None:
        text += f", after a step of up to {job.step_seconds:.3g} s"
    return text


def _check_requeue(job: BatchScript) -> Iterator[LintFinding]:
    """Whether the job comes back, and its log with it."""
    refused, wanted = job.option("no-requeue"), job.option("requeue")
    is_refused = refused is not None and (wanted is None or wanted.start < refused.start)
    # Without any option in the script, they are on the command line; and a script that submits
    # the next job itself does not need this one back.
    expects_return = job.is_training and bool(job.options) and not job.is_resubmitted
    last = max(0, job.options_at - 1)
    if refused is not None and is_refused and expects_return:
        text = (
            "with --no-requeue the job is gone after a preemption, a node failure or "
            "`scontrol requeue`: it never starts again."
        )
        edits = [remove_option(job, refused)]
        if wanted is None:
            edits = [Edit(refused.start, refused.end, "--requeue")]
        yield report(job, "requeue-refused", WARNING, refused.start, text, edits=edits)
    elif wanted is None and not is_refused and expects_return:
        text = (
            "without --requeue the site's setting (JobRequeue) decides whether the job comes back "
            "after a preemption or a node failure."
        )
        edits = [add_option(job, "--requeue")]
        yield report(job, "requeue-missing", WARNING, last, text, edits=edits)
    mode, output = job.option("open-mode"), job.option("output")
    if is_refused or (wanted is None and not expects_return):
        return
    if output is not None and output.value == "/dev/null":
        return
    name = "slurm-%j.out" if output is None else output.value
    text = "a requeued job truncates its log: what earlier attempts wrote to "
    text = f"{text}{name} is lost."
    if mode is None:
        at = last if output is None else output.start
        edits = [add_option(job, "--open-mode=append")]
        yield report(job, "log-truncated", WARNING, at, text, edits=edits)
    elif not "append".startswith(mode.value.lower() or "?"):
        edits = [set_value(mode, "append")]
        yield report(job, "log-truncated", WARNING, mode.start, text, edits=edits)
