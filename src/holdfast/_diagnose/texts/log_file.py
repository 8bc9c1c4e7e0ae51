"""Log files of any length and encoding."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from holdfast._diagnose.texts.launchers import split_reports
from holdfast._diagnose.texts.lines import Text
from holdfast._diagnose.texts.signs import Sign, read_signs
from holdfast._store.folder.plain_file import open_file

HEAD_BYTES = 64 << 10
TAIL_BYTES = 4 << 20
OUTPUT_CHARACTERS = 64 << 10
_COUNTED_BYTES = 256 << 20  # between head and tail; lines beyond it are estimated
_PIPED_BYTES = 1 << 30  # a device may have no end


def read_log(path: Path) -> tuple[list[Sign], str]:
    """The signs in a file, and its end as plain text; of a long one its beginning and its end."""
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        size = found.st_size
        head = file.read(HEAD_BYTES + TAIL_BYTES)
        if not stat.S_ISREG(found.st_mode):  # a pipe, as of `holdfast why <(kubectl logs …)`
            head = _last_of(file, head)
        if size <= len(head):
            text = decode(head)
            return read_signs(text), _end_of(text)
        encoding = _encoding(head)
        file.seek((size - TAIL_BYTES) & ~1)
        tail = file.read(TAIL_BYTES + 2)
        skipped = _lines_between(file, HEAD_BYTES, size - len(tail))
    first, whole = head[:HEAD_BYTES].decode(encoding, "replace"), tail.decode(encoding, "replace")
    start = whole.find("\n") + 1
    first_line = first.count("\n") + skipped + 1 + (start > 0)
    first, report = split_reports(first)
    last = read_signs(
        whole[start:].rstrip() + f"\n{report}" if report else whole[start:], first_line
    )
    total = first_line + whole.count("\n", start) - whole.endswith("\n")
    early = [
        replace(sign, details={**sign.details, "from_end": total - sign.line, "is_past": True})
        for sign in read_signs(first)
    ]
    return [*early, *last], _end_of(whole)


def read_tail(path: Path, size_bytes: int = OUTPUT_CHARACTERS) -> str:
    """The end of a log as plain text, without colours; empty if it is not a readable file."""
    try:
        with open_file(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - size_bytes))
            return _end_of(decode(file.read(size_bytes)))
    except OSError:
        return ""


def _last_of(file: BinaryIO, data: bytes) -> bytes:
    """The end of a pipe, which cannot be read twice."""
    read = len(data)
    while read < _PIPED_BYTES and (more := file.read(1 << 20)):
        read += len(more)
        data = (data + more)[-TAIL_BYTES:]
    return data


def decode(data: bytes) -> str:
    """A log as text; bytes that are no text become replacement marks."""
    return data.decode(_encoding(data[:HEAD_BYTES]), "replace").removeprefix("\ufeff")


def _encoding(start: bytes) -> str:
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16-le" if start[0] == 0xFF else "utf-16-be"
    sample = start[:4096]
    # Output that Windows' shells redirect has a zero after nearly every letter. All zeros is a
    # hole: the log was truncated while it was written.
    letters = len(sample) // 2 - sample[::2].count(0)
    if letters > 32 and sample[1::2].count(0) > len(sample) // 3:
        return "utf-16-le"
    return "utf-8"


def _end_of(text: str) -> str:
    """The end of a text, without colours and overwritten states of progress bars."""
    plain = Text(text[-4 * OUTPUT_CHARACTERS :]).whole.replace("\r\n", "\n")
    lines = [line.rstrip("\r").rpartition("\r")[2] for line in plain.split("\n")]
    return "\n".join(lines)[-OUTPUT_CHARACTERS:]


def _lines_between(file: BinaryIO, start: int, end: int) -> int:
    """The number of lines in the middle of a file; of a very long one an estimate."""
    file.seek(start)
    lines, left = 0, end - start
    while left > 0 and end - start - left < _COUNTED_BYTES:
        data = file.read(min(1 << 20, left))
        if not data:
            break
        lines += data.count(b"\n")
        left -= len(data)
    looked_at = end - start - left
    return lines if left <= 0 or not looked_at else lines * (end - start) // looked_at
