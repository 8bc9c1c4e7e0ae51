"""The journal: one JSON object a line, only ever appended to.

A line goes out in a single write to a descriptor opened for appending, so that
trainer and keeper can both write. A crash can leave half a line; readers skip
what does not parse, and the next writer starts on a line of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def append(path: Path, event: str, **fields: Any) -> bool:
    """Append one event; False if the file system would not take it (training goes on)."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and hasattr(os, "pread") and os.pread(descriptor, 1, size - 1) != b"\n":
                line = "\n" + line
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The events so far, oldest first."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    with file:
        for line in file:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event
