"""What a stack means: what a thread waits for, and on which line of the user's.

A call into C leaves no frame, so the text of that line is read from its file, too.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from holdfast import _text as words
from holdfast._diagnose.hangs.stack_table import FILE_CALLS, RULES, TEXTS, WCHANS
from holdfast._environment.processes.activity import is_users
from holdfast._environment.processes.threads import STDIN_PIPE, is_terminal
from holdfast._store.folder.plain_file import MOST_RECORD_BYTES, open_file

# -- One line of a user's source -------------------------------------------------------------------
# A script may lie on the very file system that does not answer. So a thread reads it, and is left
# behind after a moment.

_WAIT_SECONDS = 0.5
_OLD_SECONDS = 60.0  # after which a line is read again: the script may have been edited
_MOST_CHARACTERS = 400
_known: dict[tuple[str, int], tuple[float, str]] = {}
_stuck: set[str] = set()  # files that did not answer: they are not read a second time


def source_line(file: str, line: int) -> str:
    """The text of a line without its indentation; empty if it cannot be read."""
    if not file.startswith("/") or line < 1 or file in _stuck:
        return ""
    known = _known.get((file, line))
    if known is not None and time.monotonic() - known[0] < _OLD_SECONDS:
        return known[1]
    found: list[str] = []
    reader = threading.Thread(target=_read, args=(file, line, found), daemon=True)
    try:
        reader.start()
    except RuntimeError:  # no thread can be started: do without the line
        return ""
    reader.join(_WAIT_SECONDS)
    if reader.is_alive():
        _stuck.add(file)
        return ""
    text = found[0] if found else ""
    _known[(file, line)] = (time.monotonic(), text)
    return text


def _read(file: str, line: int, found: list[str]) -> None:
    try:
        # A record names it, and a record may name anything. A link is common among sources.
        with open_file(Path(file).resolve(), most_bytes=MOST_RECORD_BYTES) as source:
            for text in islice(source, line - 1, line):
                found.append(text.decode("utf-8", "replace").strip()[:_MOST_CHARACTERS])
    except (OSError, ValueError):
        return


Record = dict[str, Any]

_FORKED = re.compile(r"/multiprocessing/process\.py$")  # outside of it are its parent's frames
_HELPERS = re.compile(r"/multiprocessing/(?:resource_tracker|forkserver)\.py$")
_NAMELESS = ("loader", "pool")  # no function says more than the words do
_IMPORT = "<frozen importlib"
_WRAPPERS = re.compile(
    r"wrapper|wrapped|inner|_fn|_?_?call_?_?|_(?:wrapped_)?call_impl|decorate_context"
)
_SPECIFIC = ("fuse", "nfs", "netfs", "filelock", "fifo", "disk", "frozen", "traced")
_GPU = "device"
_MOST_RANKS = 8  # that are named one by one
WAITS_FOR_RANKS = ("collective", "rendezvous", "agree")


@dataclass(frozen=True)
class Place:
    """A line of code."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.short} in {self.function}" if self.function else self.short

    @property
    def short(self) -> str:
        """As `train.py:41`."""
        parts = self.file.rsplit("/", 2)
        shown = parts[-1]
        if shown in ("__init__.py", "__main__.py") and len(parts) > 1:
            shown = f"{parts[-2]}/{shown}"
        return f"{shown}:{self.line}"

    @property
    def function(self) -> str:
        """As `load()`; empty at the top of a module."""
        last = self.name.rsplit(".", 1)[-1]
        return "" if last in ("", "<module>") else f"{last}()" if last[0] != "<" else last

    @property
    def text(self) -> str:
        return source_line(self.file, self.line)


@dataclass(frozen=True)
class ThreadStanding:
    """What one thread does: `waits for a lock` at `train.py:41 in step()`."""

    kind: str  # "lock", "queue", "event", "loader", "pool", "collective", "file", …; "" if unknown
    words: str
    call: str  # the function of the library that it is in, as `all_reduce`; empty if none
    place: Place | None  # the innermost line that is the user's own
    path: tuple[tuple[str, int], ...] = ()  # all lines that are the user's own, innermost first

    @property
    def at(self) -> str:
        return f" at {self.place}" if self.place else ""

    def tell(self) -> str:
        return f"{self.words}{self.at}"

    def where(self) -> str:
        """As `in all_reduce at train.py:41`."""
        at = self.place.short if self.place else ""
        if self.call:
            return f"in {self.call} at {at}" if at else f"in {self.call}"
        return f"in {at}" if at else "at an unknown place"


def places(frames: object) -> list[Place]:
    """The frames of a record, innermost first; of a forked worker only its own."""
    found: list[Place] = []
    for frame in words.records(frames):
        file, name = words.text(frame.get("file")), words.text(frame.get("name"))
        if _FORKED.search(file) and name.endswith("_bootstrap"):
            break
        found.append(Place(file, words.whole(frame.get("line")) or 0, name))
        if _HELPERS.search(file) and name == "main":
            break
    return found


def read_thread(thread: Record) -> ThreadStanding:
    return read_stack(
        thread.get("frames"),
        words.text(thread.get("wchan")),
        words.text(thread.get("state")),
        words.text(thread.get("call")),
        words.text(thread.get("call_path")),
    )


def read_stack(
    frames: object, wchan: str = "", state: str = "", call: str = "", path: str = ""
) -> ThreadStanding:
    """What a stack means.

    `wchan` is the kernel's word for where it sleeps, `call` the system call that it is in, and
    `path` the file behind that.
    """
    found = places(frames)
    first = next((i for i, each in enumerate(found) if is_users(each.file)), None)
    place = found[first] if first is not None else None
    way = tuple((each.file, each.line) for each in found if is_users(each.file))
    inside = found[:first]
    kind, said, name = _meaning(inside, place, wchan, state, call, path)
    function = "" if kind in _NAMELESS else name or _call_of(inside)
    return ThreadStanding(kind, said, function, place, way)


def _meaning(
    inside: Sequence[Place], place: Place | None, wchan: str, state: str, call: str, path: str
) -> tuple[str, str, str]:
    """Kind, words, and the function of the library where a rule names one."""
    kernel = _of_kernel(wchan)
    if kernel is not None and kernel[0] in _SPECIFIC:
        return kernel[0], f"{kernel[1]}{_of_file(path)}", ""
    if any(each.file.startswith(_IMPORT) for each in inside):
        return "import", "is in an import", "import"
    if is_terminal(path) and call in ("read", "select", "pselect6"):
        return "input", "waits for keyboard input", ""
    named_file = path.startswith("/") and not path.startswith(("/dev/", "/memfd:"))
    if kernel is None and call in FILE_CALLS and (named_file or not path) and state != "R":
        return "file", f"is in {call}{_of_file(path)}", ""
    for each in reversed(inside):
        last = each.name.rsplit(".", 1)[-1]
        for file, names, kind, said in RULES:
            if re.search(file, each.file) and (not names or re.fullmatch(names, last)):
                return kind, said.format(name=last), last
    if path == STDIN_PIPE:
        return "stdin", "waits for its standard input, a pipe", ""
    if kernel is not None and kernel[0] != "futex":
        named = _of_file(path) if kernel[0] == "pipe" else ""  # a FIFO has a name
        return kernel[0], f"{kernel[1]}{named}", ""
    if call in _CALLS:
        return *_CALLS[call], ""
    if path.startswith("socket:") and call in FILE_CALLS:
        return "network", "waits for the network", ""
    if place is not None and not inside and state != "R":
        for shape, (kind, said) in TEXTS.items():
            if re.search(shape, place.text):
                return kind, said, ""
    if kernel is not None or call == "futex":
        # A line that could be read and that takes no lock is a call into C.
        is_call = bool(inside) or place is None or bool(place.text)
        return ("call", _IN_C, "") if is_call else ("lock", _FUTEX, "")
    said = "computes" if state == "R" else "is in a call of C" if inside or place else "stands"
    return "", said, ""


_FUTEX = "waits for a lock, or in a call of C for another thread"
_IN_C = "waits in a call of C"
# Where the kernel has no word for the place.
_CALLS = {
    "clock_nanosleep": ("sleep", "sleeps"),
    "nanosleep": ("sleep", "sleeps"),
    "pause": ("sleep", "waits for a signal"),
    "wait4": ("child", "waits for a process to end"),
    "waitid": ("child", "waits for a process to end"),
    "flock": ("filelock", "waits for a lock on a file"),
    "recvfrom": ("network", "waits for the network"),
    "recvmsg": ("network", "waits for the network"),
    "accept": ("network", "waits for a connection"),
    "accept4": ("network", "waits for a connection"),
    "connect": ("network", "waits for a connection"),
}


def _of_file(path: str) -> str:
    return f" ({path})" if path.startswith("/") else ""


def _of_kernel(wchan: str) -> tuple[str, str] | None:
    found = (meaning for shape, meaning in WCHANS.items() if wchan and re.search(shape, wchan))
    return next(found, None)


def _call_of(inside: Sequence[Place]) -> str:
    names = (each.name.rsplit(".", 1)[-1] for each in reversed(inside))
    return next((name for name in names if not _WRAPPERS.fullmatch(name)), "")


def trainer_of(look: Record) -> Record:
    """The training process of an inspection, which comes first."""
    found = words.records(look.get("processes"))
    return found[0] if found else {}


def main_thread(process: Record) -> Record:
    threads = words.records(process.get("threads"))
    return next((t for t in threads if t.get("is_main") is True), threads[0] if threads else {})


def standing_of(look: Record) -> ThreadStanding:
    process = trainer_of(look)
    thread = main_thread(process)
    for name in ("wchan", "state"):
        if not thread.get(name):
            thread = {**thread, name: process.get(name)}
    found = read_thread(thread)
    text = found.place.text if found.place is not None and not found.kind else ""
    shapes = (shape for shape, (kind, _) in TEXTS.items() if kind == _GPU)
    if text and _uses_gpu(process) and any(re.search(shape, text) for shape in shapes):
        # A thread that waits for a GPU spins, and looks as if it computed.
        return replace(found, kind=_GPU, words="waits for the GPU")
    return found


def _uses_gpu(process: Record) -> bool:
    """Whether the driver has started threads in it."""
    threads = words.records(process.get("threads"))
    return any(words.text(each.get("name")).startswith("cuda") for each in threads)


def rank_of(look: Record) -> int | None:
    return words.whole(look.get("rank"))


def name_ranks(ranks: Iterable[int | None]) -> str:
    """As `rank 2`, `ranks 0, 1 and 3`, `3 ranks`.

    >>> name_ranks([2]), name_ranks([0, 1, 3]), name_ranks([])
    ('rank 2', 'ranks 0, 1 and 3', 'no rank')
    """
    known = sorted({rank for rank in ranks if rank is not None})
    if not known:
        return "no rank"
    if len(known) == 1:
        return f"rank {known[0]}"
    if len(known) > _MOST_RANKS:
        return f"{len(known)} ranks ({known[0]}, {known[1]}, … {known[-1]})"
    return f"ranks {', '.join(map(str, known[:-1]))} and {known[-1]}"


def merge_looks(looks: Sequence[Record], missing: Sequence[int] = ()) -> list[str]:
    """Where each rank stands: one line for all on the same line, the largest group first.

    As `3 ranks in all_reduce at train.py:41 (0, 1 and 3)` and `rank 2 in dataset.py:17 (load)`.
    """
    if len(looks) == 1 and not missing and not rank_of(looks[0]):
        return [f"it is {_line_of(looks[0])}"]
    groups: dict[str, list[int | None]] = {}
    for look in looks:
        groups.setdefault(_line_of(look), []).append(rank_of(look))
    lines = []
    for line, ranks in sorted(groups.items(), key=lambda each: (-len(each[1]), str(each[1]))):
        lines.append(f"{_who(ranks)} {line}")
    if missing:
        lines.append(f"{name_ranks(missing)}: no answer")
    return lines


def _who(ranks: list[int | None]) -> str:
    known = [rank for rank in ranks if rank is not None]
    if not known:
        return "it is"
    if len(known) == 1:
        return f"rank {known[0]}"
    return f"{len(known)} ranks ({name_ranks(known).removeprefix('ranks ')})"


def _line_of(look: Record) -> str:
    found = standing_of(look)
    paused = words.text(look.get("paused"))
    if paused:
        return f"{found.where()}, held by {paused}"
    trainer = trainer_of(look)
    if trainer.get("frozen") is True or trainer.get("state") == "T":
        return f"{found.where()}, {'frozen' if trainer.get('frozen') is True else 'stopped'}"
    said = f" ({found.words})" if not found.call and found.words else ""
    return f"{found.where()}{said}"
