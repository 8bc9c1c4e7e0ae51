"""All damage of a checkpoint, found in little memory.

Resuming stops at the first wrong byte and holds the whole image. `holdfast verify` names every
damaged tensor, and may run while a training needs the memory.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

import xxhash

from holdfast._errors import CheckpointError
from holdfast._store.folder.plain_file import open_file
from holdfast._store.format.manifest import DataFile, Part
from holdfast._store.read.files import all_files, name_part, place_of
from holdfast._store.read.verify import parse_ends, read_manifest

_CHUNK_BYTES = 16 << 20


def find_damage(folder: Path) -> list[str]:
    """One line for each damage; none if every byte is as it was written."""
    try:
        found = read_manifest(folder)
    except CheckpointError as error:
        return [_within(folder, error)]
    lines: list[str] = []
    for file in found.files:
        try:
            damage = check_file(folder, file)
        except OSError as error:
            missing = Path(error.filename or file.name).name
            damage = [f"{missing}: {error.strerror}"]
        except CheckpointError as error:
            damage = [_within(folder, error)]
        # A tensor's name may be in the files of several ranks.
        is_named = len(found.files) == 1
        lines += (
            line if is_named or line.startswith(file.name) else f"{file.name}: {line}"
            for line in damage
        )
    return lines


def _within(folder: Path, error: CheckpointError) -> str:
    """The text of an error, with names relative to the checkpoint."""
    return str(error).removeprefix(f"{folder}: ").removeprefix(f"{folder}/").rstrip(".")


def check_file(folder: Path, file: DataFile) -> list[str]:
    """The damage of a rank's state, in its own file and in linked ones."""
    with contextlib.ExitStack() as stack:
        opened: dict[str, IO[bytes]] = {}
        for name, size_bytes in all_files(file):
            data = stack.enter_context(open_file(place_of(folder, name)))
            size = os.fstat(data.fileno()).st_size
            if size != size_bytes:
                return [f"{name} has {size} bytes, the manifest says {size_bytes}"]
            opened["" if name == file.name else name] = data
        parts = [*file.parts] if file.wrapper is None else [file.wrapper, *file.parts]
        lines = [_describe(part) for part in parts if not _is_whole(opened[part.file], part)]
        if not lines:
            # Intact bytes must also be a valid state: resuming requires the same.
            ends = [*file.parts[:1], *file.parts[-1:]]
            where = folder / file.name
            parse_ends(file.parts, lambda: [_read(opened, part) for part in ends], where)
        return lines


def _describe(part: Part) -> str:
    where = f" (in {part.file})" if part.file else ""
    return f"{name_part(part.name)} is damaged{where}"


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


def _read(opened: dict[str, IO[bytes]], part: Part) -> memoryview:
    opened[part.file].seek(part.offset)
    return memoryview(opened[part.file].read(part.size_bytes))
