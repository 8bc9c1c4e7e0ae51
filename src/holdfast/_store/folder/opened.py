"""Which run a process under `holdfast run` has opened: the leader does not know it otherwise."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from holdfast._store.folder.atomic import create_atomic
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.supervised import led_hang


def tell_leader(place: Path, folder: Path, attempt: int, rank: int) -> None:
    """Note the run where the leader looks for it; of several ranks under one leader the first."""
    mine: dict[str, Any] = {
        "folder": str(folder.absolute()),
        "attempt": attempt,
        "rank": rank,
        "pid": os.getpid(),
    }
    path = place / "run.json"
    with contextlib.suppress(OSError):
        if create_atomic(path, (json.dumps(mine, indent=1) + "\n").encode()):
            return
        there = read_json(path)
        is_same_life = [there.get(key) for key in ("folder", "attempt")] == [
            mine["folder"],
            attempt,
        ]
        other = there.get("rank")
        if not is_same_life or not isinstance(other, int) or other > rank:
            write_json(path, mine, durable=False)


def tell_leader_of_hang(place: Path, hang: dict[str, Any]) -> None:
    """The same of a hang, each time that there is news of it: found, over, or not to be killed.

    The leader does not look into the run's folder: that may be on the very file system that
    does not answer, and whoever touches it then stands still, too.
    """
    kept = {key: value for key, value in hang.items() if key != "looks"}
    with contextlib.suppress(OSError):
        write_json(led_hang(place), kept, durable=False)
