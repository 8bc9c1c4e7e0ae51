"""A process under `holdfast run` tells the supervisor which run it has opened."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._store.folder.atomic import create_atomic
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.supervised import led_hang, led_modules


def tell_leader(place: Path, folder: Path, attempt: int, rank: int) -> None:
    """Record the run where the supervisor looks; of several ranks the first."""
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


def tell_leader_of_modules(place: Path) -> None:
    """Record what is imported, in the order of the imports, for a spare."""
    specs = ((name, getattr(each, "__spec__", None)) for name, each in list(sys.modules.items()))
    # An alias, such as os.path, cannot be imported under its own name.
    names = [name for name, spec in specs if spec is not None and spec.name == name]
    record = {"modules": names, "environment": variables.changed_since_start()}
    with contextlib.suppress(OSError):
        write_json(led_modules(place), record, durable=False)


def tell_leader_of_hang(place: Path, hang: dict[str, Any]) -> None:
    """The same for each change of a hang: found, over, or not to be killed.

    The supervisor does not read the run's folder: that may be on the file system that does not
    answer, and then the supervisor would hang too.
    """
    kept = {key: value for key, value in hang.items() if key != "looks"}
    with contextlib.suppress(OSError):
        write_json(led_hang(place), kept, durable=False)
