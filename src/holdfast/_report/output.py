"""The last lines that a run printed, where its output is kept.

`holdfast run` keeps the output: while the command runs in its own folder, after that in the run
folder. SLURM keeps the output of a job in a file that its controller names. Other output goes to
a terminal, and nothing has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TypedDict

from holdfast import _text
from holdfast._diagnose.texts.log_file import read_tail
from holdfast._environment.slurm.controller import can_ask, describe_job
from holdfast._store.folder.attempts import find_run, read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.supervised import led_outputs

_MOST_CHARACTERS = 20_000
_NEWEST = 3  # attempts
_STDOUT = re.compile(r"\bStdOut=(\S+)")
_JOB = re.compile(r"\d{1,20}(?:_\d{1,10})?")


class Output(TypedDict):
    """`where` is the file; both are empty where no output is kept."""

    attempt: int | None
    where: str
    text: str


def read_output(folder: Path) -> Output:
    layout, _ = find_run(folder)
    for attempt in reversed(layout.attempt_numbers()[-_NEWEST:]):
        ours = led_outputs(layout.folder, attempt)
        for path in chain([layout.output(attempt)], ours, _of_job(layout, attempt)):
            tail = read_tail(path).strip("\n")[-_MOST_CHARACTERS:]
            if tail:
                text = "\n".join(_text.printable(line) for line in tail.split("\n"))
                return Output(attempt=attempt, where=_text.name(path), text=text)
    return Output(attempt=None, where="", text="")


def _of_job(layout: RunLayout, attempt: int) -> Iterator[Path]:
    """The file of a SLURM job, by its controller; a few minutes after its end it is forgotten."""
    lease = _text.record(read_json(layout.lease(attempt)).get("job"))
    job = str(lease.get("number") or "")
    if not _JOB.fullmatch(job) or not can_ask():
        return
    for line in describe_job(job)[:1]:
        # Before it is the name of the job, which can be anything.
        found = _STDOUT.search(line.partition(" UserId=")[2])
        if found is not None and found[1].startswith("/") and found[1] != "/dev/null":
            yield Path(found[1])
