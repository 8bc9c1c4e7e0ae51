"""What lint cannot judge: said, since silence would read as a good script."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast._check.finding import HINT, NOT_UNDERSTOOD, Finding
from holdfast._check.job import Job
from holdfast._check.noting import note

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
