"""Two results, compared by their content: files of torch, safetensors and NumPy array by array.

Tensors are compared as bytes, and so are numbers: a NaN equals itself, and minus zero is not zero.
A file that cannot be read is a difference if the expected one can. If neither can, their bytes are
compared. Nothing in a file is ever run.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import mmap
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from holdfast._store.format.image import STORED_AS

Array = np.ndarray[Any, Any]
Data = bytes | mmap.mmap

WHOLE = "the whole file"
_MOST_CHARACTERS = 60
_CHUNK = 1 << 20  # elements: as float64 they nearly fit into a processor's cache
_NUMPY = frozenset(("bool", "float16", "float32", "float64", "complex64", "complex128"))
_NUMPY |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
_OLD_TORCH = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # how files begin that are no zip
_NAMES = {stored: name for name, stored in STORED_AS.items()}
_OPAQUE = "(compared as bytes: it holds objects)"
_NOT_COMPARED = (".data/serialization_id",)  # different in each file


@dataclass(frozen=True)
class FileDifference:
    file: str
    item: str  # where in it, e.g. "optimizer.state[0].exp_avg"
    expected: str
    found: str
    apart: str  # how far, e.g. "up to 0.0031, 1.2% of its norm"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file has it: its bytes, without a framework."""

    dtype: str  # e.g. "bfloat16"
    shape: tuple[int, ...]
    data: Array  # of uint8, flat and in C order

    def values(self) -> Array:
        """As numbers where NumPy has the type, else as opaque items, else as bytes."""
        count = math.prod(self.shape)
        item_bytes, rest = divmod(self.data.size, count) if count else (0, 0)
        if item_bytes == 0 or rest:
            return self.data  # several of them share a byte, or the file's header is damaged
        if self.dtype == "bfloat16" and item_bytes == 2:
            # The upper half of a float32.
            halves = self.data.view("<u2").astype("<u4") << 16
            return halves.view("<f4").reshape(self.shape)
        is_number = self.dtype in _NUMPY and np.dtype(self.dtype).itemsize == item_bytes
        dtype = self.dtype if is_number else f"V{item_bytes}"
        return self.data.view(dtype).reshape(self.shape)


def stored_bytes(data: memoryview) -> Array:
    return np.frombuffer(data, np.uint8) if data.nbytes else np.empty(0, np.uint8)


def stored_array(array: Array) -> StoredTensor:
    """An array of NumPy as it would be in a file."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    flat = np.frombuffer(array.tobytes(), np.uint8)
    return StoredTensor(array.dtype.name, array.shape, flat)


def first_difference(file: str, expected: Any, found: Any) -> FileDifference | None:
    """The first difference in the order of the expected tree; None if there is none."""
    first = next(_differences("", expected, found), None)
    return None if first is None else FileDifference(file, first[0] or WHOLE, *first[1:])


def _differences(item: str, expected: Any, found: Any) -> Iterator[tuple[str, str, str, str]]:
    """Where two values differ, the two in words, and how far they are apart."""
    expected, found = _simple(expected), _simple(found)
    if isinstance(expected, StoredTensor) and isinstance(found, StoredTensor):
        yield from _of_tensors(item, expected, found)
    elif isinstance(expected, Mapping) and isinstance(found, Mapping):
        for key in {**expected, **found}:
            if not isinstance(key, str):
                below = f"{item}[{key!r}]"
            else:
                below = f"{item}.{key}" if item else key
            if key not in found:
                yield below, _words(expected[key]), "nothing", "it is missing"
            elif key not in expected:
                yield below, "nothing", _words(found[key]), "it should not be there"
            else:
                yield from _differences(below, expected[key], found[key])
    elif isinstance(expected, list) and type(expected) is type(found):
        for index, (one, other) in enumerate(zip(expected, found, strict=False)):
            yield from _differences(f"{item}[{index}]", one, other)
        if len(expected) != len(found):
            yield item, f"{len(expected)} items", f"{len(found)} items", "another length"
    elif not _is_same(expected, found):
        yield item, _words(expected), _words(found), _apart(expected, found)


def _simple(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        return repr(array.tolist()) if array.dtype.hasobject else stored_array(array)
    if isinstance(value, set | frozenset):
        return sorted(value, key=lambda one: (type(one).__name__, repr(one)))
    if isinstance(value, tuple):
        return list(value)
    return value


def _is_same(expected: Any, found: Any) -> bool:
    if type(expected) is not type(found):
        return False
    if isinstance(expected, float):
        return struct.pack("<d", expected) == struct.pack("<d", found) or (
            expected != expected and found != found
        )
    return bool(expected == found)


def _of_tensors(
    item: str, expected: StoredTensor, found: StoredTensor
) -> Iterator[tuple[str, str, str, str]]:
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        what = "another shape" if expected.dtype == found.dtype else "another type of number"
        yield item, _words(expected), _words(found), what
    elif expected.data.size != found.data.size:  # the header of one is damaged
        yield item, f"{expected.data.size} bytes", f"{found.data.size} bytes", "another length"
    elif not np.array_equal(expected.data, found.data):
        one, other = expected.values(), found.values()
        item_bytes = expected.data.size // one.size  # as stored: some are wider as numbers
        index = int(np.argmax(expected.data != found.data)) // item_bytes
        where = ""
        if one.size > 1:
            place = np.unravel_index(index, one.shape)
            where = f" at [{', '.join(str(int(axis)) for axis in place)}]"
        first = one.reshape(-1)[index], other.reshape(-1)[index]
        is_opaque = one.dtype.kind == "V"
        words = [f"0x{each.tobytes().hex()}" if is_opaque else str(each) for each in first]
        yield item, words[0] + where, words[1] + where, distance(one, other)


def _apart(expected: Any, found: Any) -> str:
    if type(expected) is not type(found):
        return "another kind of value"
    if isinstance(expected, float):
        return distance(np.array([expected]), np.array([found]))
    if isinstance(expected, int) and not isinstance(expected, bool):
        return f"by {abs(expected - found)}" if abs(expected - found) < 10**20 else "far"
    return "another value"


def _words(value: Any) -> str:
    value = _simple(value)
    if isinstance(value, StoredTensor):
        return f"{value.dtype}, {_shape_words(value.shape)}"
    if isinstance(value, Mapping):
        return f"{len(value)} names"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return f"{len(value)} items"
    if isinstance(value, bytes | bytearray):
        return f"{len(value)} bytes"
    try:
        text = repr(value)
    except ValueError:  # Python makes no text of a number of a few thousand digits
        return f"a number of {value.bit_length()} bits"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


def distance(expected: Array, found: Array) -> str:
    """How far apart two arrays are.

    >>> distance(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    'up to 0.5, 10% of its norm'
    """
    if expected.shape != found.shape:
        return f"shape {_shape_words(found.shape)} in place of {_shape_words(expected.shape)}"
    if expected.dtype != found.dtype:
        return f"{found.dtype.name} in place of {expected.dtype.name}"
    if expected.dtype.kind not in "fc":
        unlike = int(np.count_nonzero(expected != found))
        return f"{unlike} of {expected.size} elements" if unlike else "not at all"
    most = squares = norm_squares = 0.0
    unlike = 0  # elements that are NaN or infinite, and not the same on both sides
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    # In chunks: both as float64 at once would take three times the memory.
    for start in range(0, expected.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        one, other = (array.reshape(-1)[part].astype(wide) for array in (expected, found))
        with np.errstate(all="ignore"):
            alike = (one == other) | (np.isnan(one) & np.isnan(other))
            finite = np.isfinite(one) & np.isfinite(other)
            unlike += int(np.count_nonzero(~alike & ~finite))
            apart = np.abs(np.where(finite, other - one, 0))
            most = max(most, float(apart.max(initial=0.0)))
            squares += float(np.sum(apart**2))
            norm_squares += float(np.sum(np.abs(np.where(np.isfinite(one), one, 0)) ** 2))
    words = []
    if unlike:
        words.append(f"{unlike} of {expected.size} are NaN or infinite on one side only")
    if most:
        words.append(f"up to {most:.2g}{_share_words(squares, norm_squares)}")
    if not words:
        same = expected.tobytes() == found.tobytes()
        return "not at all" if same else "only by the signs of zeros or the bits of NaNs"
    return ", ".join(words)


def _share_words(squares: float, norm_squares: float) -> str:
    """The norm of the difference relative to the norm of the expected values."""
    if norm_squares == 0:
        return ", and all of it should be zero"
    share = math.sqrt(squares) / math.sqrt(norm_squares)
    if not math.isfinite(share) or share == 0:  # the squares are beyond what a float can hold
        return ""
    if share < 1e-4:
        return f", {share:.1e} of its norm"
    if share < 10:
        return f", {share * 100:.2g}% of its norm" if share < 1 else f", {share:.0%} of its norm"
    return f", {share:.2g} times its norm"


def _shape_words(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "of one number"


def compare_files(name: str, expected: Path, found: Path) -> FileDifference | None:
    """The first difference between two files (or folders) of results; None if there is none."""
    try:
        there = _is_there(expected), _is_there(found)
        if there == (False, False):
            return None
        if there != (True, True):
            if there[0]:
                return FileDifference(name, WHOLE, "a file", "no file", "it is missing")
            return FileDifference(name, WHOLE, "no file", "a file", "it should not be there")
        if expected.is_dir() and found.is_dir():
            return _compare_folders(name, expected, found)
        one, other = _map(expected), _map(found)
    except OSError as error:
        said = error.strerror or str(error)
        return FileDifference(name, WHOLE, "a file", "cannot be read", said)
    offset = _first_unequal(one, other)
    if offset is None:
        return None
    for read in _readers(expected):
        try:
            tree = read(expected)
        except Exception:  # noqa: BLE001  not of this format, whatever its name says
            continue
        try:
            found_tree = read(found)
        except Exception as error:  # noqa: BLE001  a damaged file raises anything
            said = str(error).partition("\n")[0][:200] or type(error).__name__
            return FileDifference(name, WHOLE, "a whole file", "cannot be read", said)
        try:
            return first_difference(name, tree, found_tree)
        except RecursionError:  # it contains itself
            break
    return _compare_bytes(name, one, other, offset)


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


def _first_unequal(one: Data, other: Data) -> int | None:
    length = min(len(one), len(other))
    for start in range(0, length, _CHUNK):
        parts = [
            np.frombuffer(d, np.uint8, min(_CHUNK, length - start), start) for d in (one, other)
        ]
        unlike = parts[0] != parts[1]
        if unlike.any():
            return start + int(np.argmax(unlike))
    return None if len(one) == len(other) else length


def _compare_bytes(name: str, one: Data, other: Data, offset: int) -> FileDifference:
    start = one.rfind(b"\n", 0, offset) + 1
    lines = _line_at(one, start, offset), _line_at(other, start, offset)
    if lines[0] is not None and lines[1] is not None:
        number = one[:start].count(b"\n") + 1
        return FileDifference(name, f"line {number}", lines[0], lines[1], "another text")
    sizes = f"{len(one)} bytes", f"{len(other)} bytes"
    return FileDifference(name, WHOLE, *sizes, f"from byte {offset} on")


def _map(path: Path) -> Data:
    with path.open("rb") as file:
        # An empty file cannot be mapped.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.read(1) else b""


def _line_at(data: Data, start: int, offset: int) -> str | None:
    """The text of the line with this byte; None if the data are no text."""
    end = data.find(b"\n", offset)
    end = len(data) if end < 0 else end
    # Of a very long line, the text around the byte.
    first, last = max(start, offset - _MOST_CHARACTERS), min(end, offset + _MOST_CHARACTERS)
    if data.find(b"\0", 0, last) >= 0:
        return None
    is_cut = first > start or last < end
    try:
        text = data[first:last].decode(errors="ignore" if is_cut else "strict").rstrip()
    except UnicodeDecodeError:
        return None
    if start == len(data):
        return "the end of the file"
    return f"{'…' if first > start else ''}{text}{'…' if last < end else ''}"


def _readers(path: Path) -> Iterator[Callable[[Path], Any]]:
    """The readers for this file, the best first."""
    suffix = path.suffix.lower()
    is_zip = _begins(path, b"PK\x03\x04")  # zipfile.is_zipfile raises where one is damaged
    if suffix == ".safetensors":
        yield _read_safetensors
    elif suffix in _TORCH_SUFFIXES or _is_by_torch(path, is_zip):
        yield _read_torch
        if is_zip:
            yield _read_members
    elif suffix == ".npz" and is_zip:
        yield _read_npz
    elif _begins(path, b"\x93NUMPY"):
        yield functools.partial(np.load, allow_pickle=False)


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


def _read_torch(path: Path) -> Any:
    from holdfast.torch.pt_file import read_pt

    return read_pt(path, lambda dtype, shape, data: StoredTensor(dtype, shape, stored_bytes(data)))


def _read_members(path: Path) -> dict[str, Any]:
    """The members of the zip as bytes, for a file that torch would load only by running code."""
    with zipfile.ZipFile(path) as archive:
        # The first part is the file's own name.
        names = {name: name.partition("/")[2] or name for name in archive.namelist()}
        return {
            f"{inner} {_OPAQUE}": np.frombuffer(archive.read(name), np.uint8)
            for name, inner in names.items()
            if inner not in _NOT_COMPARED
        }


def _read_npz(path: Path) -> dict[str, Any]:
    """The arrays by name; those of objects as bytes, since loading them would run code."""
    found = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            name = member.removesuffix(".npy")
            data = archive.read(member)
            try:
                found[name] = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
            except ValueError:
                found[f"{name} {_OPAQUE}"] = np.frombuffer(data, np.uint8)
    return found


def _read_safetensors(path: Path) -> dict[str, Any]:
    whole = _map(path)
    length = int.from_bytes(whole[:8], "little")
    if len(whole) < 8 or length > len(whole) - 8:
        raise ValueError("it ends within its header")
    header = json.loads(whole[8 : 8 + length])
    data = np.frombuffer(whole, np.uint8)[8 + length :]
    metadata = header.pop("__metadata__", None) or {}
    tree: dict[str, Any] = {}
    for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = about["data_offsets"]
        shape, kind = tuple(about["shape"]), about["dtype"]
        if not 0 <= first <= last <= data.size:
            raise ValueError(f"it ends within {name}")
        tree[name] = StoredTensor(_NAMES.get(kind, kind), shape, data[first:last])
    # That of `holdfast export`, without the attempt, which may differ.
    ours = {name: json.loads(metadata[name]) for name in metadata if name.startswith("holdfast")}
    if isinstance(ours.get("holdfast"), dict):
        ours["holdfast"].pop("attempt", None)
    return tree | {"__metadata__": metadata | ours}
