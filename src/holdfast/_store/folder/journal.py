"""The journal: one JSON object a line, only ever appended to.

A line is a single write to a descriptor opened for appending, so that trainer and keeper can both
write. A crash can leave half a line; readers skip what does not parse, and the next writer begins a
new line.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from holdfast._store.folder.plain_file import MOST_LINES_BYTES, NotPlain, open_file, open_plain
from holdfast._store.format.schema import parse_record

_LONGEST_LINE_BYTES = 16 << 20
_BLOCK_BYTES = 1 << 18


def append(path: Path, event: str, **fields: Any) -> bool:
    """Append one event; False if the file system refuses it (training goes on)."""
    line = json.dumps({"time": round(time.time(), 3), "event": event, **fields}) + "\n"
    return append_line(path, line.encode())


def append_line(path: Path, line: bytes) -> bool:
    """Append a line; False if the file system refuses it, or takes only a part of it."""
    try:
        descriptor = open_plain(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        try:
            size = os.fstat(descriptor).st_size
            # After a full disk or a power cut the last line may be incomplete.
            if size and hasattr(os, "pread") and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            return os.write(descriptor, line) == len(line)
        finally:
            os.close(descriptor)
    except OSError:
        return False


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The events so far, oldest first; none if the file is missing or not a plain file."""
    with _open(path) as file:
        for line in _lines(file):
            event = parse(line)
            if event is not None:
                yield event


def read_pieces(path: Path) -> Iterator[bytes]:
    """The same as blocks of whole lines, not parsed: for a reader that needs few of them."""
    with _open(path) as file:
        while piece := file.read(_LONGEST_LINE_BYTES):
            yield piece + file.readline(_LONGEST_LINE_BYTES)


def read_back(path: Path) -> Iterator[bytes]:
    """The lines, newest first and not parsed: for a reader that stops when it knows enough.

    A run of weeks has hundreds of thousands of lines, and parsing them takes seconds.
    """
    with _open(path) as file:
        end = file.seek(0, os.SEEK_END)
        rest = b""
        while end:
            start = max(0, end - _BLOCK_BYTES)
            file.seek(start)
            first, *lines = (file.read(end - start) + rest).split(b"\n")
            yield from filter(None, reversed(lines))
            # The beginning of this line is in the block before; a very long line is skipped.
            rest, end = first[:_LONGEST_LINE_BYTES], start
        if rest:
            yield rest


def _open(path: Path) -> BinaryIO:
    try:
        return open_file(path, most_bytes=MOST_LINES_BYTES)
    except (FileNotFoundError, NotPlain):
        return io.BytesIO()


def parse(line: bytes) -> dict[str, Any] | None:
    """The object in one line; None if it is invalid."""
    try:
        return parse_record(line)
    except ValueError:
        return None


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Each line, except for very long ones, which would fill the memory."""
    is_rest = False
    while line := file.readline(_LONGEST_LINE_BYTES):
        is_whole = line.endswith(b"\n") or len(line) < _LONGEST_LINE_BYTES
        if is_whole and not is_rest:
            yield line
        is_rest = not is_whole
