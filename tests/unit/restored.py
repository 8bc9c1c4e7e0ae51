"""What real deaths and hangs have left, put back into a folder: see tests/recording.py."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.recording import COMMAND, HOME, RECORDS


def restore(home: Path, table: str, name: str, way: str, *, needs: str = "") -> Path:
    """Write the files of a record below `home`, which takes the place of the home they had."""
    files = _records(table).get(name, {}).get(way)
    if files is None:
        told = f"{name}, {way}: there is no record of it. Make it: {COMMAND}"
        pytest.skip(f"{told}, on a machine with a GPU") if needs == "GPU" else pytest.fail(told)
    for path, content in files.items():
        target = home / path
        if path.endswith("/"):
            target.mkdir(parents=True)
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        target.write_text(text.replace(HOME, str(home)))
    return home


@functools.cache
def _records(table: str) -> dict[str, dict[str, dict[str, Any]]]:
    path = RECORDS / f"{table}.json"
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text())
    return found
