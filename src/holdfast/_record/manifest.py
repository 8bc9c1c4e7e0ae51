"""The manifest: what a checkpoint must contain, written last.

It carries the checksum of every byte range of the data file and one of itself:
a flipped bit anywhere is told from what was written.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import xxhash

from holdfast._errors import DamagedCheckpoint, UnreadableCheckpoint

FORMAT = 1


@dataclass(frozen=True)
class Part:
    """One byte range of the data file: the header, or one tensor."""

    name: str
    offset: int
    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class DataFile:
    """One rank's file and the ranges that cover it."""

    name: str
    size_bytes: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is and what must be in it."""

    run_id: str
    attempt: int
    step: int
    reason: str
    saved_at: float
    files: tuple[DataFile, ...]
    metrics: dict[str, float | None] = field(default_factory=dict)
    holdfast: str = ""
    origin: tuple[int, int] | None = None  # the (attempt, step) that its attempt came from

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        body: dict[str, Any] = {"format": FORMAT, **asdict(self)}
        return json.dumps({"manifest": body, "xxh3_128": _checksum(body)}, indent=1).encode()


def _checksum(body: dict[str, Any]) -> str:
    return str(xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode()))


def parse(data: bytes, where: str) -> Manifest:
    """The manifest in `data`; `where` is what the error names if it is damaged."""
    try:
        outer = json.loads(data)
        body = outer["manifest"]
        if outer["xxh3_128"] != _checksum(body):
            raise ValueError("its own checksum does not fit")
        if body.pop("format") != FORMAT:
            raise UnreadableCheckpoint(
                f"{where}: was written by another version of holdfast "
                f"({body.get('holdfast') or 'unknown'}).\nUse that version; nothing was changed."
            )
        files = tuple(
            DataFile(f["name"], f["size_bytes"], tuple(Part(**part) for part in f["parts"]))
            for f in body.pop("files")
        )
        origin = body.pop("origin", None)
        origin = None if origin is None else (int(origin[0]), int(origin[1]))
        return Manifest(files=files, origin=origin, **body)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{where}: the manifest is damaged ({error}).") from error
