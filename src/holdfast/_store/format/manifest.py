"""The manifest: what a checkpoint must contain, written last.

It has the checksum of every byte range of the data files and of itself: a flipped bit anywhere is
detected. What did not change since the previous checkpoint is not written again: the part is in a
file of that checkpoint, which is hard-linked into this folder too.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from holdfast._errors import DamagedCheckpoint, UnreadableCheckpoint
from holdfast._store.folder.layout import MANIFEST
from holdfast._store.folder.plain_file import NotPlain, read_plain
from holdfast._store.format.schema import check_file, check_manifest

FORMAT = 2
_MOST_BYTES = 1 << 30  # ten million parts
_CHECKSUM_CHARACTERS = 32
_OUTER = re.compile(rb'\{"xxh3_128": "([0-9a-f]{32})",\n"manifest": ')
_END = b"}\n"
_INVALID = (
    *(ValueError, LookupError, TypeError),
    *(AttributeError, ArithmeticError, RecursionError),
)
_FILES = b', "files": ['


class Part(NamedTuple):
    """One byte range of an image: the header, a tensor, or the scalars."""

    name: str
    offset: int  # in its file
    size_bytes: int
    checksum: str
    file: str = ""  # of the same folder, if it is not the rank's own


class Linked(NamedTuple):
    """A file of an earlier checkpoint, some of whose parts are in this one too."""

    name: str
    size_bytes: int


@dataclass(frozen=True)
class DataFile:
    """One rank's file and the parts of its image, in their order there."""

    name: str
    size_bytes: int
    parts: tuple[Part, ...]
    linked: tuple[Linked, ...] = ()
    # If the file holds only some of the image: the safetensors header at its start. The image's
    # own header is then one of the parts.
    wrapper: Part | None = None

    @property
    def image_bytes(self) -> int:
        """The size of the state."""
        return sum(part.size_bytes for part in self.parts)

    @property
    def all_parts(self) -> tuple[Part, ...]:
        return self.parts if self.wrapper is None else (self.wrapper, *self.parts)

    @property
    def all_files(self) -> list[tuple[str, int]]:
        """The names and sizes of the files that hold the image."""
        return [(self.name, self.size_bytes), *self.linked]

    def to_json(self) -> dict[str, Any]:
        """As columns: a state may have a hundred thousand parts."""
        columns = list(zip(*self.parts, strict=True)) or [()] * 5
        places = {linked.name: number for number, linked in enumerate(self.linked, 1)}
        found: dict[str, Any] = {
            "name": self.name,
            "size_bytes": self.size_bytes,
            "names": columns[0],
            "offsets": columns[1],
            "sizes": columns[2],
            "checksums": "".join(columns[3]),
        }
        if self.linked:
            found["linked"] = self.linked
            found["in"] = [places.get(name, 0) for name in columns[4]]
        if self.wrapper is not None:
            found["wrapper"] = self.wrapper
        return found

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> DataFile:
        """ValueError, KeyError or TypeError if it is invalid."""
        linked = tuple(Linked(*item) for item in found.get("linked", ()))
        files = ["", *(item.name for item in linked)]
        names, text = found["names"], found["checksums"]
        width = _CHECKSUM_CHARACTERS
        checksums = [text[at : at + width] for at in range(0, len(text), width)]
        places = [files[number] for number in found["in"]] if linked else [""] * len(names)
        columns = (names, found["offsets"], found["sizes"], checksums, places)
        parts = tuple(Part(*row) for row in zip(*columns, strict=True))
        wrapper = found.get("wrapper")
        top = None if wrapper is None else Part(*wrapper)
        file = cls(found["name"], found["size_bytes"], parts, linked, top)
        check_file(file)
        return file


@dataclass(frozen=True)
class Manifest:
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
        return sum(file.image_bytes for file in self.files)

    def to_bytes(self) -> bytes:
        names = [name for name in self.__dataclass_fields__ if name != "files"]
        body = {
            "format": FORMAT,
            **{name: getattr(self, name) for name in names},
            "files": [file.to_json() for file in self.files],  # last: most readers skip it
        }
        return seal(json.dumps(body).encode())


def seal(body: bytes) -> bytes:
    """The file for a body: its checksum on one line, the body on the next."""
    checksum = xxhash.xxh3_128_hexdigest(body).encode()
    return b'{"xxh3_128": "' + checksum + b'",\n"manifest": ' + body + _END


def read(folder: Path, *, head: bool = False) -> Manifest:
    """The manifest of a checkpoint; with `head`, without its files. OSError if it is missing."""
    data = read_raw(folder)
    return parse_head(data, str(folder)) if head else parse(data, str(folder))


def read_size(folder: Path) -> tuple[float, int]:
    """When a checkpoint was saved, and the size of its state, without parsing each part."""
    found = _parse(read_raw(folder), str(folder), _load_sizes)
    return found.saved_at, found.files[0].size_bytes


def _load_sizes(inner: bytes) -> Any:
    body = json.loads(inner)
    size = sum(sum(file["sizes"]) for file in body["files"])
    empty = DataFile("", 0, ()).to_json()
    return {**body, "files": [{**empty, "name": "all", "size_bytes": size}]}


def read_raw(folder: Path) -> bytes:
    if folder.is_symlink():
        raise NotPlain(folder, "a symbolic link and not a checkpoint")
    return read_plain(folder / MANIFEST, _MOST_BYTES)


def parse(data: bytes, where: str) -> Manifest:
    """The manifest in `data`; the error names `where` if it is damaged."""
    return _parse(data, where, json.loads)


def parse_head(data: bytes, where: str) -> Manifest:
    """The same without its files, which may have very many parts."""
    return _parse(data, where, _load_head)


def _load_head(inner: bytes) -> Any:
    head, files, _ = inner.partition(_FILES)
    with contextlib.suppress(ValueError):  # the name occurs elsewhere
        return {**json.loads(head + b"}" if files else inner), "files": ()}
    return {**json.loads(inner), "files": ()}


def _parse(data: bytes, where: str, load: Callable[[bytes], Any]) -> Manifest:
    try:
        outer = _OUTER.match(data)
        if outer is None or not data.endswith(_END):
            raise ValueError("not a manifest, or cut short")
        inner = data[outer.end() : -len(_END)]
        if xxhash.xxh3_128_hexdigest(inner).encode() != outer[1]:
            raise ValueError("its own checksum does not fit")
        body = load(inner)
        if body.pop("format") != FORMAT:
            raise UnreadableCheckpoint(
                f"{where}: was written by another version of holdfast "
                f"({body.get('holdfast') or 'unknown'}).\nUse that version; nothing was changed."
            )
        files = tuple(DataFile.from_json(file) for file in body.pop("files"))
        origin = body.pop("origin", None)
        origin = None if origin is None else (origin[0], origin[1])
        found = Manifest(files=files, origin=origin, **body)
        check_manifest(found)
        return found
    except _INVALID as error:
        raise DamagedCheckpoint(f"{where}: the manifest is damaged ({error}).") from error
