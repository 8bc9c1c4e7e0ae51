"""A copied run folder is a run of its own.

`cp -r` is how people branch an experiment. The copy has the id of the original, and would share
its arenas, its attempts and its row in every table. So run.json also says where the folder was
made. If another folder is still there and has this id, this one is the copy. If there is none, the
folder was moved, and stays the run that it was.
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from holdfast._store.folder.atomic import write_atomic
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.plain_file import read_plain
from holdfast._store.format.schema import parse_record
from holdfast._text import say


def own_id(layout: RunLayout, record: dict[str, Any]) -> str:
    """The id of the run in a folder whose run.json says `record`."""
    run_id = str(record["run_id"])
    if _original(layout, record) is None:
        return run_id
    # Every reader gets the same id, before and after a start has stored it.
    return hashlib.blake2b(f"{run_id} {layout.folder}".encode(), digest_size=16).hexdigest()


def settle_identity(layout: RunLayout, record: dict[str, Any]) -> None:
    """Write down where the folder is, and that a copy is a run of its own."""
    if record.get("folder") == str(layout.folder):
        return
    original = _original(layout, record)
    found = {**record, "run_id": own_id(layout, record), "folder": str(layout.folder)}
    if original is not None:
        say(f"{layout.folder}: is a copy of {original.folder}; from here on it is its own run.")
        found["copied_from"] = str(original.folder)
        _end_copied_attempts(layout, original)
    _write(layout.identity, found)


def _original(layout: RunLayout, record: dict[str, Any]) -> RunLayout | None:
    """The run that this folder is a copy of; None if it is none, or if the other is gone."""
    place = record.get("folder")
    if not isinstance(place, str) or place == str(layout.folder):
        return None
    found = RunLayout(Path(place))
    try:
        if found.identity.samefile(layout.identity):
            return None  # by another name of the same folder
        is_same_run = parse_record(read_plain(found.identity)).get("run_id") == record["run_id"]
    except (OSError, ValueError):
        return None
    return found if is_same_run else None


def _end_copied_attempts(layout: RunLayout, original: RunLayout) -> None:
    """A process that trains in the original does not train here."""
    for number in layout.attempt_numbers():
        if layout.exit(number).exists():
            continue
        # An attempt that another rank has begun here meanwhile has another lease.
        leases = [_read(each.lease(number)) for each in (layout, original)]
        if leases[0] == leases[1]:
            end = {"status": None, "how": f"copied from {original.folder}", "time": time.time()}
            _write(layout.exit(number), end)


def _read(path: Path) -> bytes:
    try:
        return read_plain(path)
    except OSError:
        return b""


def _write(path: Path, value: dict[str, Any]) -> None:
    write_atomic(path, (json.dumps(value, indent=1) + "\n").encode())
