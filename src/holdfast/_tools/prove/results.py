"""How two trainings ended: their newest checkpoints, their weights and their files, compared.

What must differ is left out: attempts, times, ids, and when the run's phases came. Nothing in a
run folder is changed; damaged checkpoints stay where they are.

Files of torch, safetensors and NumPy are compared array by array. Tensors are compared as bytes,
and so are numbers: a NaN equals itself, and minus zero is not zero. A file that cannot be read is
a difference if the expected one can. If neither can, their bytes are compared. Nothing in a file
is ever run.
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
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from holdfast._errors import CheckpointError, FolderError
from holdfast._store.folder.attempts import find_run
from holdfast._store.folder.lineage import is_on_line
from holdfast._store.format.image import STORED_AS
from holdfast._store.format.tree import Pairs, TreeVisitor
from holdfast._store.read.merge_ranks import read_checkpoint, read_world
from holdfast._store.read.verify import Loaded
from holdfast._tools.convert.export import own_lineage
from holdfast._tools.prove.causes import Deviation
from holdfast._tools.prove.script_run import ScriptRun, UndisturbedRun

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
# With a blank: the names of the user's states are keywords, and have none.
_GENERATORS = "global generators"
# The rest of a position depends on these and on the generators.
_POSITION = ("epoch", "lap", "batches", "is_over", "state", "states")


@dataclass(frozen=True)
class _Newest:
    step: int
    ranks: list[dict[str, Any]]  # of each: state, metrics, position, generators, as plain trees
    name: str


def compare_runs(
    expected: Path, found: Path, unseeded: Collection[str] = ()
) -> FileDifference | None:
    """The first difference between the newest good checkpoints of two runs, or None.

    `unseeded` generators ("python", "numpy", …) are not compared: one that a script never seeds
    differs each time, and may be unused.
    """
    newest: list[_Newest] = []
    for folder in (expected, found):
        try:
            newest.append(_newest(folder))
        except (CheckpointError, FolderError) as error:
            said = str(error).partition("\n")[0]
            sides = (f"step {newest[0].step}", said) if newest else (said, "")
            return FileDifference(str(folder), "the newest checkpoint", *sides, "cannot be read")
    one, other = newest
    if one.step != other.step:
        steps, apart = (str(one.step), str(other.step)), f"by {abs(one.step - other.step)}"
        return FileDifference(other.name, "the number of steps", *steps, apart)
    if len(one.ranks) != len(other.ranks):
        counts = str(len(one.ranks)), str(len(other.ranks))
        return FileDifference(other.name, "the number of ranks", *counts, "by their number")
    for rank, pair in enumerate(zip(one.ranks, other.ranks, strict=True)):
        there, here = (
            parts
            | {_GENERATORS: {n: v for n, v in parts[_GENERATORS].items() if n not in unseeded}}
            for parts in pair
        )
        difference = first_difference(other.name, there, here)
        if difference is not None:
            of_rank = f"rank {rank}: " if len(one.ranks) > 1 else ""
            return replace(difference, item=of_rank + difference.item)
    return None


def unlike_generators(expected: Path, found: Path) -> frozenset[str]:
    """The global generators whose states differ: in two undisturbed runs, the unseeded ones."""
    try:
        both = [_newest(path).ranks for path in (expected, found)]
    except (CheckpointError, FolderError):
        return frozenset()
    return frozenset(
        name
        for one, other in zip(*both, strict=False)
        for name in {**one[_GENERATORS], **other[_GENERATORS]}
        if first_difference("", one[_GENERATORS].get(name), other[_GENERATORS].get(name))
    )


def _newest(folder: Path) -> _Newest:
    """The newest whole checkpoint on the run's own lineage, as a resume would choose it."""
    layout, run_id = find_run(folder)
    line = own_lineage(layout, run_id)
    trouble: CheckpointError | None = None
    for step, attempt, path in reversed(layout.checkpoint_folders()):
        if is_on_line(line, attempt, step):
            try:
                ranks = [read_checkpoint(path, rank) for rank in range(read_world(path))]
            except CheckpointError as error:
                trouble = trouble or error
            else:
                name = f"{folder}: {path.name}"
                return _Newest(ranks[0].head["step"], [_parts(each) for each in ranks], name)
    raise trouble or CheckpointError(f"{folder}: there is no checkpoint.")


def _parts(loaded: Loaded) -> dict[str, Any]:
    head, tree = loaded.head, loaded.head["tree"]
    plain = _ComparableTree(loaded)
    extra = plain.visit(tree.get("extra", {}), "")
    position = extra.get("position") or {}
    if position.get("is_over") or not position.get("batches"):
        position = {**position, "state": None}  # of the pass before, and unused
    return {
        **{name: plain.visit(encoded, name) for name, encoded in tree["state"].items()},
        "logged metrics": {
            **head.get("metrics", {}),
            **{f"best ({watched})": value for watched, value in head.get("best", {}).items()},
        },
        "position in the data": {n: position[n] for n in _POSITION if n in position},
        _GENERATORS: extra.get("generators") or {},
    }


class _ComparableTree(TreeVisitor):
    """Decodes a stored tree into plain containers, with its tensors as bytes."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded

    def tensor(self, number: int, _: str) -> StoredTensor:
        spec = self._loaded.plan.specs[number]
        data = stored_bytes(self._loaded.data(number) if spec.size_bytes else memoryview(b""))
        dtype = spec.dtype.removeprefix("scalar ")
        if spec.kind == "numpy" and dtype[:1] in "<|":
            dtype = np.dtype(dtype).name
        return StoredTensor("uint8" if spec.kind == "bytes" else dtype, spec.shape, data)

    def shard(self, shard: dict[str, Any], path: str) -> dict[str, Any]:
        """This rank's part, and which one it is."""
        return shard | {"t": None if shard["t"] is None else self.tensor(shard["t"], path)}

    def mapping(self, _: dict[str, Any], pairs: Pairs) -> dict[Any, Any]:
        keys = [self.visit(key, "") for key, _ in pairs]
        hashable = [tuple(key) if isinstance(key, list) else key for key in keys]
        return {key: item for key, (_, item) in zip(hashable, pairs, strict=True)}

    def container(self, _: str, inner: Any) -> Any:
        return inner

    def scalar(self, tag: str, inner: Any) -> str:
        return f"{tag[1:]} {inner}"


class ReferenceRun(UndisturbedRun):
    """A run folder in place of an undisturbed training: only its end is known."""

    def __init__(self, folder: Path, script: ScriptRun) -> None:
        super().__init__(script)
        self.folder = folder
        self._steps = _newest(folder).step
        self.start_seconds = 2.0

    @property
    def steps(self) -> int:
        return self._steps

    def moments(self) -> list[str]:
        return ["start", "step", "boundary", "commit"]

    def compare(
        self, script: ScriptRun, after: int | None, note: Callable[[str], None]
    ) -> Deviation | None:
        # The script's run of the same name, or its newest one.
        folders = [Path(folder) for folder in script.runs.values()]
        named = [folder for folder in folders if folder.name == self.folder.name]
        folder = next(iter([*named, *reversed(folders)]), None)
        if folder is None:
            texts = str(self.folder), "the script opened no run"
            return Deviation.of_texts("unknown", "the run", texts, after)
        unlike = unlike_generators(self.folder, folder)
        difference = compare_runs(self.folder, folder, unlike)
        if difference is not None:
            return _judged("reference-differs", difference.item, difference, after)
        if unlike:
            names = ", ".join(sorted(unlike))
            note(f"Not compared, since they may never be seeded: {names}.")
        return None


def end_distance(one: ScriptRun, other: ScriptRun) -> float | None:
    """The norm of the difference of all weights, relative to their norm."""
    paths = one.end / "0.float64", other.end / "0.float64"
    if not all(path.exists() for path in paths):
        return None
    first, second = (np.fromfile(path, np.float64) for path in paths)
    if first.shape != second.shape:
        return None
    apart, whole = float(np.linalg.norm(first - second)), float(np.linalg.norm(first))
    return apart / whole if whole else apart


def compare_results(
    scripts: tuple[ScriptRun, ScriptRun, ScriptRun],
    asked: tuple[str, ...],
    after: int | None,
    note: Callable[[str], None],
) -> Deviation | None:
    """The first file that differs, of those asked for and those that the script saves as results.

    A file that it resumes from is no result: the interruptions decide when it was saved last.
    """
    reference, again, script = scripts
    last = max((saved.place for saved in reference.file_log.saved.values()), default=0)
    results = sorted(
        name
        for name, saved in reference.file_log.saved.items()
        if name not in script.file_log.loaded
        and not Path(name).is_absolute()
        and (name in script.file_log.saved or saved.place >= last)
    )
    for name in dict.fromkeys([*asked, *results]):
        expected, found = _place(reference, name), _place(script, name)
        if name not in asked and not expected.exists():
            continue  # the undisturbed run has removed it by itself
        difference = compare_files(name, expected, found)
        if difference is None:
            continue
        if name not in asked and compare_files(name, expected, _place(again, name)) is not None:
            note(f"{name} is another one each time and was not compared.")
            continue
        return _judged("result-differs", f"{name}: {difference.item}", difference, after)
    return None


def _judged(cause: str, item: str, found: FileDifference, after: int | None) -> Deviation:
    texts = found.expected, f"{found.found} ({found.apart})"
    return Deviation.of_texts(cause, item, texts, after)


def _place(script: ScriptRun, name: str) -> Path:
    name = name.replace("{dir}", str(script.folder / "dir"))
    return script.work / name


_COMPARED = {
    "weight": "tensors of weights",
    "moment": "of optimizer state",
    "scheduler": "values of schedulers",
    "scaler": "of gradient scalers",
    "generator": "generators",
    "buffer": "buffers",
}


def list_compared(reference: UndisturbedRun, script: ScriptRun) -> list[str]:
    if not reference.histories:
        return ["the newest checkpoints of both runs"]
    history = reference.history()
    found = []
    if history.updates:
        kinds = Counter(item.partition("/")[0] for item in history.end or history.updates[-1].items)
        found += [f"{kinds[kind]} {text}" for kind, text in _COMPARED.items() if kind in kinds]
        batches = sum(len(update.batches) for update in history.updates)
        if batches and not history.boundaries:  # those of a run are part of its boundaries
            found.append(f"{batches} batches")
    if history.boundaries:
        found.append(f"{len(history.boundaries)} boundaries with all state, metrics and batches")
    files = sum(name not in script.file_log.loaded for name in reference.script.file_log.saved)
    return [*found, f"{files} files"] if files else found


# -- values and files -------------------------------------------------------------


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
