"""Adds to start.json what takes long to find out: changes in git, and the script of a batch job.

In a thread of the keeper of rank 0: git may need seconds, and SLURM's controller may not answer.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._text import record as record_in
from holdfast._text import text

_RECORD_SECONDS = 20.0


def complete_start(layout: RunLayout, attempt: int) -> None:
    """Read the record, find out the rest, and write it again."""
    with contextlib.suppress(Exception):  # no run fails because of it
        path = layout.start(attempt)
        deadline = time.monotonic() + _RECORD_SECONDS
        while not (before := read_json(path)) and time.monotonic() < deadline:
            time.sleep(0.1)  # a thread of the trainer writes it
        found: dict[str, Any] = {}
        git = record_in(before.get("git"))
        if git and "dirty" not in git:
            from holdfast._environment.git import read_changes  # slow to import, and needed once

            found["git"] = {**git, **read_changes(Path(text(git.get("folder"))))}
        job = text(before.get("job"))
        if job and "batch" not in before:
            from holdfast._environment.slurm.controller import read_batch

            batch = read_batch(job)
            if batch is not None:
                found |= {"batch": batch, "launcher": "sbatch"}
        # Another run may have the folder by now.
        if found and read_json(path) == before:
            write_json(path, {**before, **found}, durable=False)
