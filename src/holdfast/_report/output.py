"""The last lines that a run printed, where its output is kept.

`holdfast run` keeps the output: while the command runs in its own folder, after that in the run
folder. SLURM keeps the output of a job in a file, which its controller and the record of the start
name. Other output goes to a terminal, and nothing has it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TypedDict

from holdfast import _text
from holdfast._diagnose.texts.log_file import read_tail
from holdfast._environment.slurm.controller import can_ask, describe_job, output_file
from holdfast._store.folder.attempts import find_run, read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.supervised import led_outputs

_MOST_CHARACTERS = 20_000
_NEWEST = 3  # attempts
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
    """The file of a SLURM job: by the record of its start, or else by its controller.

    The controller forgets a job a few minutes after its end.
    """
    start = layout.start(attempt)
    recorded = _text.text(_text.record(read_json(start).get("batch")).get("output"))
    with contextlib.suppress(OSError, ValueError):
        # A forged record may name any file, and a page may be shown to others.
        if _is_output(recorded) and Path(recorded).stat().st_uid == start.lstat().st_uid:
            yield Path(recorded)
            return
    lease = _text.record(read_json(layout.lease(attempt)).get("job"))
    job = str(lease.get("number") or "")
    if _JOB.fullmatch(job) and can_ask():
        yield from (
            Path(name) for name in map(output_file, describe_job(job)[:1]) if _is_output(name)
        )


def _is_output(name: str) -> bool:
    return name.startswith("/") and name != "/dev/null"
