"""The state of a run whose folder is gone: the arena in memory gets a folder again.

The new folder has the id of the run and its last attempt. So the next start finds the arenas as
those of a life before, checks them, goes on there and makes the state durable.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from holdfast._errors import HoldfastError
from holdfast._run.exit.leaving import ExitRecord
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import note_origin, read_json, write_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.memory.arena import Arena, NotAnArena
from holdfast._store.memory.backing import open_leftover, users_of
from holdfast._tools.convert.adopt.adoption import publish_run, refuse_a_run


def adopt_memory(folder: Path, source: Path) -> int:
    """Make a run folder for the arena in this file; returns the step that is in it."""
    refuse_a_run(folder)
    if pids := users_of().get(source):
        raise HoldfastError(
            f"{source}: a process has it open (pid {', '.join(map(str, sorted(pids)))}): its run "
            "has not ended.\nStop that first."
        )
    run_id, attempt, step = _read(source)

    def make(unfinished: Path) -> None:
        layout = RunLayout(unfinished)
        for path in (layout.attempt(attempt), layout.checkpoints, layout.requests):
            path.mkdir(parents=True)
        identity = {"run_id": run_id, "created": time.time(), "folder": str(folder.absolute())}
        write_json(layout.identity, identity)
        note_origin(layout, attempt, None)
        journal.append(layout.journal, "adopted", attempt=attempt, step=step, source=str(source))
        record = {"status": None, "how": "adopted from memory", "step": step}
        ExitRecord(layout, attempt).write(record, asked=False)

    publish_run(folder, make)
    return step


def _read(source: Path) -> tuple[str, int, int]:
    descriptor = open_leftover(source)
    if descriptor is None:
        raise HoldfastError(f"{source}: there is no arena of yours here.")
    try:
        arena = Arena(descriptor)
    except (NotAnArena, ValueError, OSError) as error:
        os.close(descriptor)
        raise HoldfastError(f"{source}: is no arena ({error}).") from error
    steps = [record.step for record in arena.whole() if record.is_hashed]
    found = arena.run_id, arena.attempt, max(steps, default=-1)
    place = arena.folder
    arena.close()
    if not steps:
        raise HoldfastError(f"{source}: holds no snapshot that a start would use.")
    if place and read_json(RunLayout(Path(place)).identity).get("run_id") == found[0]:
        raise HoldfastError(
            f"{source}: its run is in {place}.\nStart the same command again: it goes on there."
        )
    return found
