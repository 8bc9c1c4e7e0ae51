"""One line of a user's source, where it can be read at once.

A script may lie on the very file system that does not answer: so it is read in a thread that
is left behind then, and nothing waits for it longer than a moment.
"""

from __future__ import annotations

import threading
import time
from itertools import islice
from pathlib import Path

from holdfast._record.plain_file import MOST_RECORD_BYTES, open_file

_WAIT_SECONDS = 0.5
_OLD_SECONDS = 60.0  # after which a line is read again: the script may have been edited
_MOST_CHARACTERS = 400
_known: dict[tuple[str, int], tuple[float, str]] = {}
_stuck: set[str] = set()  # files that did not answer: they are not asked a second time


def source_line(file: str, line: int) -> str:
    """The text of a line, without what it is indented by; empty if it cannot be read."""
    if not file.startswith("/") or line < 1 or file in _stuck:
        return ""
    known = _known.get((file, line))
    if known is not None and time.monotonic() - known[0] < _OLD_SECONDS:
        return known[1]
    found: list[str] = []
    reader = threading.Thread(target=_read, args=(file, line, found), daemon=True)
    try:
        reader.start()
    except RuntimeError:  # no thread is to be had: the line is only an ornament
        return ""
    reader.join(_WAIT_SECONDS)
    if reader.is_alive():
        _stuck.add(file)
        return ""
    text = found[0] if found else ""
    _known[(file, line)] = (time.monotonic(), text)
    return text


def _read(file: str, line: int, found: list[str]) -> None:
    try:
        # A record names it, and a record may name anything. A link is common among sources.
        with open_file(Path(file).resolve(), most_bytes=MOST_RECORD_BYTES) as source:
            for text in islice(source, line - 1, line):
                found.append(text.decode("utf-8", "replace").strip()[:_MOST_CHARACTERS])
    except (OSError, ValueError):
        return  # it lies elsewhere, or is none that can be read
