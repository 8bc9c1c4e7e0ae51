"""Everything that is wrong with a checkpoint, found in little memory.

Resuming stops at the first wrong byte and holds the whole image. `holdfast verify`
names every damaged tensor, and may run beside a training that needs the memory.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

import xxhash

from holdfast._errors import CheckpointError
from holdfast._record.image import decode_scalars, header_bytes, parse_header
from holdfast._record.manifest import DataFile, Part
from holdfast._resume.verify import check_head, name_part, read_manifest

_CHUNK_BYTES = 16 << 20


def find_damage(folder: Path) -> list[str]:
    """One line for each thing that is wrong; none if every byte is as it was written."""
    try:
        found = read_manifest(folder)
    except CheckpointError as error:
        return [str(error).removeprefix(f"{folder}: ").rstrip(".")]
    lines: list[str] = []
    for file in found.files:
        try:
            damage = check_file(folder / file.name, file)
        except OSError as error:
            damage = [f"{file.name}: {error.strerror}"]
        # Of several ranks each has its file, and a tensor's name may be in all of them.
        is_named = len(found.files) == 1
        lines += (
            line if is_named or line.startswith(file.name) else f"{file.name}: {line}"
            for line in damage
        )
    return lines


def check_file(path: Path, file: DataFile) -> list[str]:
    with path.open("rb", buffering=0) as data:
        size = os.fstat(data.fileno()).st_size
        if size != file.size_bytes:
            return [f"{file.name} has {size} bytes, the manifest says {file.size_bytes}"]
        lines = [f"{name_part(p.name)} is damaged" for p in file.parts if not _is_whole(data, p)]
        return lines or _check_contents(data)


def _is_whole(data: IO[bytes], part: Part) -> bool:
    hasher = xxhash.xxh3_128()
    data.seek(part.offset)
    left = part.size_bytes
    while left:
        chunk = data.read(min(left, _CHUNK_BYTES))
        if not chunk:
            return False
        hasher.update(chunk)
        left -= len(chunk)
    return bool(hasher.hexdigest() == part.checksum)


def _check_contents(data: IO[bytes]) -> list[str]:
    """Bytes that are as they were written must also be a state: resuming asks the same."""
    try:
        data.seek(0)
        length = header_bytes(data.read(8))
        data.seek(0)
        place = parse_header(data.read(length)).scalars
        data.seek(place.offset)
        head = decode_scalars(data.read(place.size_bytes))
        check_head(head)
    except (ValueError, KeyError, TypeError) as error:
        return [f"is not a state of holdfast ({error})"]
    return []
