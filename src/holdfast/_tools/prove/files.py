"""Two files of results, compared by what is in them: tensor by tensor where that can be read.

A file that cannot be read is a difference if the expected one can; if neither can, their
bytes are compared. Nothing in a file is ever run.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from holdfast._store.format.image import STORED_AS
from holdfast._tools.prove.difference import (
    WHOLE,
    Array,
    FileDifference,
    StoredTensor,
    first_difference,
    stored_array,
    stored_bytes,
)

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files begin that are no zip
_NAMES = {stored: name for name, stored in STORED_AS.items()}
_ITEM_BITS = {"F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_ITEM_BITS |= {"BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "BF16": 16}
_ITEM_BITS |= {f"{kind}{bits}": bits for kind in "UIFC" for bits in (8, 16, 32, 64, 128)}
_CHUNK_BYTES = 1 << 20
_LINE_CHARACTERS = 60
# Different in each file.
_NOT_COMPARED = (".data/serialization_id",)


def compare_files(name: str, expected: Path, found: Path) -> FileDifference | None:
    """The first difference between two files (or folders) of results; None if there is none."""
    try:
        there = _is_there(expected), _is_there(found)
        if there == (False, False):
            return None
        if there != (True, True):
            one, other = ("a file" if is_there else "no file" for is_there in there)
            apart = "it is missing" if there[0] else "it should not be there"
            return FileDifference(name, WHOLE, one, other, apart)
        if expected.is_dir() and found.is_dir():
            return _compare_folders(name, expected, found)
        offset = _first_unequal(expected, found)
    except OSError as error:
        said = error.strerror or str(error)
        return FileDifference(name, WHOLE, "a file", "cannot be read", said)
    if offset is None:
        return None
    for read in _readers(expected):
        try:
            tree = read(expected)
        except Exception:  # noqa: BLE001  not of this format, whatever its name says
            continue
        try:
            other = read(found)
        except Exception as error:  # noqa: BLE001  a damaged file raises anything
            said = str(error).partition("\n")[0][:200] or type(error).__name__
            return FileDifference(name, WHOLE, "a whole file", "cannot be read", said)
        try:
            return first_difference(name, tree, other)
        except RecursionError:  # it contains itself
            break
    return _compare_bytes(name, expected, found, offset)


def _is_there(path: Path) -> bool:
    return path.is_file() or path.is_dir()  # opening a pipe would block


def _compare_folders(name: str, expected: Path, found: Path) -> FileDifference | None:
    inside: set[Path] = set()
    for folder in (expected, found):
        inside |= {p.relative_to(folder) for p in folder.rglob("*") if p.is_file()}
    for path in sorted(inside):
        difference = compare_files(f"{name}/{path}", expected / path, found / path)
        if difference is not None:
            return difference
    return None


def _first_unequal(expected: Path, found: Path) -> int | None:
    """The first byte that differs."""
    with expected.open("rb") as one, found.open("rb") as other:
        position = 0
        while True:
            a, b = one.read(_CHUNK_BYTES), other.read(_CHUNK_BYTES)
            if a != b:
                length = min(len(a), len(b))
                unlike = np.frombuffer(a[:length], np.uint8) != np.frombuffer(b[:length], np.uint8)
                return position + (int(np.argmax(unlike)) if unlike.any() else length)
            if not a:
                return None
            position += len(a)


def _compare_bytes(name: str, expected: Path, found: Path, offset: int) -> FileDifference:
    one, other = _line_at(expected, offset), _line_at(found, offset)
    if one is not None and other is not None:
        return FileDifference(name, f"line {one[0]}", one[1], other[1], "another text")
    sizes = [f"{path.stat().st_size} bytes" for path in (expected, found)]
    return FileDifference(name, WHOLE, sizes[0], sizes[1], f"from byte {offset} on")


def _line_at(path: Path, offset: int) -> tuple[int, str] | None:
    """The number and the text of the line with this byte; None if the file is no text."""
    number, start, done = 1, 0, 0
    with path.open("rb") as file:
        while done < offset:
            piece = file.read(min(_CHUNK_BYTES, offset - done))
            if not piece or b"\0" in piece:
                return None
            number += piece.count(b"\n")
            if b"\n" in piece:
                start = done + piece.rindex(b"\n") + 1
            done += len(piece)
        # Of a very long line, the text around the byte.
        begin = max(start, offset - _LINE_CHARACTERS)
        file.seek(begin)
        rest = file.read(offset - begin + _LINE_CHARACTERS)
    if b"\0" in rest:
        return None
    line, has_end, _ = rest.partition(b"\n")
    cut = bool(has_end) or len(rest) < offset - begin + _LINE_CHARACTERS
    try:
        text = line.decode() if begin == start and cut else line.decode(errors="ignore")
    except UnicodeDecodeError:
        return None
    if not text and not rest:
        return number, "the end of the file"
    return number, f"{'' if begin == start else '…'}{text.rstrip()}{'' if cut else '…'}"


# -- formats ----------------------------------------------------------------------


def _readers(path: Path) -> Iterator[Callable[[Path], Any]]:
    """The readers for this file, the best first."""
    suffix = path.suffix.lower()
    is_zip = _begins(path, b"PK\x03\x04")  # zipfile.is_zipfile raises where one is damaged
    if suffix == ".json":
        yield _read_json
    elif suffix == ".safetensors":
        yield _read_safetensors
    elif suffix == ".npy":
        yield lambda file: _array_of(file.read_bytes())
    elif suffix == ".npz":
        yield _read_npz
    elif suffix in _TORCH_SUFFIXES or _is_by_torch(path, is_zip):
        yield _read_torch
        if is_zip:
            yield _read_members


def _begins(path: Path, magic: bytes) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(magic)) == magic
    return False


def _is_by_torch(path: Path, is_zip: bool) -> bool:
    if not is_zip:
        return _begins(path, _OLD_TORCH)
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except Exception:  # noqa: BLE001  a damaged zip raises anything
        return False


def _read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _read_npz(path: Path) -> dict[str, Any]:
    with zipfile.ZipFile(path) as archive:
        return {n.removesuffix(".npy"): _array_of(archive.read(n)) for n in archive.namelist()}


def _array_of(data: bytes) -> StoredTensor:
    try:
        array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except ValueError:
        if not data.startswith(b"\x93NUMPY") or b"O'" not in data[:256]:
            raise
        return stored_array(np.frombuffer(data, np.uint8))  # Python's objects are not loaded
    return stored_array(np.asarray(array))


def _read_torch(path: Path) -> Any:
    from holdfast.torch import pt_file

    return pt_file.read_pt(
        path, lambda dtype, shape, data: StoredTensor(dtype, shape, stored_bytes(data))
    )


def _read_members(path: Path) -> dict[str, Any]:
    """The members of the zip as bytes, for a file that torch would load only by running code."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            inner = name.partition("/")[2] or name  # the first part is the file's own name
            if inner not in _NOT_COMPARED:
                found[f"{inner} (compared as bytes: it holds objects)"] = stored_array(
                    np.frombuffer(archive.read(name), np.uint8)
                )
    return found


def _read_safetensors(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError("it ends within its header")
        header = json.loads(file.read(length))
    data: Array = np.empty(0, np.uint8)
    if size > 8 + length:
        data = np.memmap(path, np.uint8, "r", 8 + length)
    metadata = header.pop("__metadata__", None) or {}
    tree: dict[str, Any] = {}
    for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = about["data_offsets"]
        shape, kind = tuple(about["shape"]), about["dtype"]
        if not 0 <= first <= last <= data.size:
            raise ValueError(f"it ends within {name}")
        if math.prod(shape) * _ITEM_BITS.get(kind, 0) != (last - first) * 8 and kind in _ITEM_BITS:
            raise ValueError(f"{name} has another size than its shape")
        tree[name] = StoredTensor(_NAMES.get(kind, kind), shape, data[first:last])
    return tree | {"__metadata__": _comparable(metadata)}


def _comparable(metadata: dict[str, str]) -> dict[str, Any]:
    """The metadata; that of `holdfast export` without the attempt, which may differ."""
    known: dict[str, Any] = dict(metadata)
    for name, text in metadata.items():
        if name.startswith("holdfast"):
            known[name] = json.loads(text)
    if isinstance(known.get("holdfast"), dict):
        known["holdfast"].pop("attempt", None)
    return known
