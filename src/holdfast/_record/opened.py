"""Which run a process under `holdfast run` has opened: the leader does not know it otherwise."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from holdfast._record.atomic import create_atomic
from holdfast._record.attempts import read_json, write_json


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
