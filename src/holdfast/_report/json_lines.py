"""Files of JSON lines that only grow, each part of which is read once.

A journal may have a million lines, and a page asks every second. An incomplete last line is left
for later. A file that was replaced, or became shorter, is read from its start.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast._store.folder import journal
from holdfast._store.folder.plain_file import MOST_LINES_BYTES, open_file

Record = dict[str, Any]

_PIECE_BYTES = 4 << 20
_LONGEST_LINE_BYTES = 64 << 20  # beyond it a file is no journal
_HEAD_BYTES = 64


class Lines:
    """The whole lines of one file, each given once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: tuple[int, int] | None = None  # device and inode
        self._head = b""
        self._offset = 0
        self._size = 0
        self.has_started_over = False  # at the last read, after something had been read

    @property
    def share(self) -> float:
        """How much of it has been read, from 0 to 1."""
        return min(1.0, self._offset / self._size) if self._size else 1.0

    def read(self) -> Iterator[bytes]:
        """What is new, in pieces of whole lines; a caller may leave the rest for later."""
        self.has_started_over = False
        try:
            with open_file(self.path, most_bytes=MOST_LINES_BYTES) as file:
                self._find_place(file.fileno())
                yield from self._pieces(file.fileno())
        except OSError:
            return  # it is not there yet, or not readable

    def _find_place(self, descriptor: int) -> None:
        status = os.fstat(descriptor)
        which = (status.st_dev, status.st_ino)
        self._size = status.st_size
        if which == self._file and status.st_size == self._offset:
            return
        head = os.pread(descriptor, _HEAD_BYTES, 0)
        is_same = which == self._file and status.st_size >= self._offset
        if not is_same or not head.startswith(self._head):
            self.has_started_over = self._offset > 0
            self._offset = 0
        self._file, self._head = which, head[: min(len(head), self._offset or len(head))]

    def _pieces(self, descriptor: int) -> Iterator[bytes]:
        size = _PIECE_BYTES
        while data := os.pread(descriptor, size, self._offset):
            end = data.rfind(b"\n") + 1
            if end:
                self._offset += end
                size = _PIECE_BYTES
                yield data if end == len(data) else data[:end]
            elif len(data) < size:
                return  # an incomplete line
            elif size >= _LONGEST_LINE_BYTES:
                self._offset += size
            else:
                size *= 2


def parse(piece: bytes) -> list[Record]:
    """The JSON objects in some lines; anything else is left out."""
    lines = piece.split(b"\n")
    try:
        # All at once is twice as fast as one by one.
        text = b"[" + b",".join(filter(None, lines)) + b"]"
        found = json.loads(text.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        found = list(map(journal.parse, lines))
    return [each for each in found if isinstance(each, dict)]
