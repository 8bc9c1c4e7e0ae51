"""A copy of the user's folder for each training, and the command as it is given there.

A script writes into its folder, and must not change the user's own files. So files are copied.
Large ones are taken for data and linked; checkpoints are copied at any size, since a script
overwrites them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdfast._errors import HoldfastError
from holdfast._store.folder.attempts import find_run, read_json
from holdfast._store.folder.layout import RunLayout
from holdfast._store.read.find import remove_leftovers

_SKIPPED = frozenset(
    (".git", ".hg", "__pycache__", "node_modules", ".mypy_cache", ".pytest_cache", ".ruff_cache")
)
_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")  # what distinguishes them from other folders
_TEXTS = frozenset((".py", ".sh", ".json", ".yaml", ".toml", ".txt", ".cfg"))
_CHECKPOINTS = frozenset((".pt", ".pth", ".ckpt", ".safetensors"))

LARGE_BYTES = 100 << 20
SMALL_BYTES = 1 << 20
MOST_FILES = 5_000
MOST_BYTES = 2 << 30
MOST_SMALL_FILES = 20_000
_KEEPER_SECONDS = 10.0


@dataclass(frozen=True)
class _CopyEntry:
    path: Path
    about: os.stat_result  # of the link itself where it is one

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.about.st_mode)

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.about.st_mode)

    @property
    def is_large_data(self) -> bool:
        return self.about.st_size > LARGE_BYTES and self.path.suffix not in _CHECKPOINTS

    @property
    def is_small(self) -> bool:
        return self.about.st_size < SMALL_BYTES or self.path.suffix in _TEXTS


def copy_folder(source: Path, target: Path, without: Collection[Path] = ()) -> list[Path]:
    """Copy a folder without caches and environments; returns the files that were linked.

    `without` names further folders to leave out; the place of the copies always is.
    """
    source, target = source.resolve(), target.resolve()
    left_out = {target, *(path.resolve() for path in without)}
    if target.parent != source and target.parent.is_relative_to(source):
        left_out.add(target.parent)  # where the copies for other trainings are
    entries = list(_walk(source, left_out))
    files = [e for e in entries if not e.is_link and not e.is_folder and not e.is_large_data]
    size_bytes = sum(entry.about.st_size for entry in files)
    is_much = len(files) > MOST_FILES or size_bytes > MOST_BYTES
    target.mkdir(parents=True, exist_ok=True)
    linked: list[Path] = []
    count = copied_bytes = 0
    for entry in entries:
        place = target / entry.path.relative_to(source)
        if entry.is_folder:
            place.mkdir(exist_ok=True)
        elif entry.is_link:
            linked += _copy_link(entry.path, place, source, target)
        elif entry.is_large_data or (is_much and _is_beyond(entry, count, copied_bytes)):
            place.symlink_to(entry.path)
            linked.append(entry.path)
        elif _copy(entry.path, place):
            count += 1
            copied_bytes += entry.about.st_size
    # The innermost folder first: a copy inside changes the time of its folder.
    for entry in reversed(entries):
        if entry.is_folder:
            place = target / entry.path.relative_to(source)
            with contextlib.suppress(OSError):
                shutil.copystat(entry.path, place)
                # The copy of a read-only folder must stay removable.
                place.chmod(stat.S_IMODE(entry.path.stat().st_mode) | stat.S_IRWXU)
    return linked


def _is_beyond(entry: _CopyEntry, count: int, copied_bytes: int) -> bool:
    if entry.path.suffix in _CHECKPOINTS:
        return False
    if entry.is_small:
        return count >= MOST_SMALL_FILES
    return count >= MOST_FILES or copied_bytes + entry.about.st_size > MOST_BYTES


def _walk(folder: Path, left_out: Collection[Path]) -> Iterator[_CopyEntry]:
    try:
        names = sorted(entry.name for entry in os.scandir(folder))
    except OSError:  # not ours to read
        return
    for name in names:
        path = folder / name
        try:
            about = path.lstat()
        except OSError:  # gone meanwhile
            continue
        if stat.S_ISDIR(about.st_mode):
            if path not in left_out and not _is_skipped(path) and not _is_run(path):
                yield _CopyEntry(path, about)
                yield from _walk(path, left_out)
        elif stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
            yield _CopyEntry(path, about)


def _is_skipped(folder: Path) -> bool:
    try:
        return folder.name in _SKIPPED or any((folder / name).exists() for name in _ENVIRONMENTS)
    except PermissionError:
        return False


def _is_run(folder: Path) -> bool:
    return bool(read_json(RunLayout(folder).identity).get("run_id"))


def _copy_link(link: Path, place: Path, source: Path, target: Path) -> list[Path]:
    """Link again; returns the original if it is outside of the copy."""
    try:
        original = link.resolve()
    except (OSError, RuntimeError):  # a ring of links
        return []
    if original.is_relative_to(source):
        # To the file in the copy: a script that writes through it must not change the user's.
        place.symlink_to(target / original.relative_to(source))
        return []
    if not original.exists():
        return []  # writing through it would create a file outside
    place.symlink_to(original)
    return [original]


def _copy(path: Path, place: Path) -> bool:
    """Copy a file with its mode and times; False if it cannot be read."""
    try:
        shutil.copyfile(path, place)
    except (PermissionError, FileNotFoundError):
        place.unlink(missing_ok=True)
        return False
    with contextlib.suppress(PermissionError):
        shutil.copystat(path, place)
    return True


# -- the command ------------------------------------------------------------------


def place_command(
    words: tuple[str, ...], folder: Path, copy: Path, substitutes: Mapping[str, str]
) -> list[str]:
    """The command for the copy of a folder.

    >>> words = ("python", "/a/t.py", "--to={dir}")
    >>> place_command(words, Path("/a"), Path("/b"), {"{dir}": "/c"})
    ['python', '/b/t.py', '--to=/c']
    """
    placed = []
    for word in words:
        name, equals, value = word.partition("=")
        if equals and not name.startswith(("/", ".")):
            word = f"{name}={_place_path(value, folder, copy)}"
        else:
            word = _place_path(word, folder, copy)
        for key, text in substitutes.items():
            word = word.replace(key, text)
        placed.append(word)
    return placed


def _place_path(word: str, folder: Path, copy: Path) -> str:
    if "/" not in word and word != "..":
        return word
    # Links stay as they are: Python finds its environment by the path it was called by.
    path = Path(os.path.normpath(folder / word))
    inside = _inside(path, folder)
    if inside is None:
        goes_up = not Path(word).is_absolute() and word.startswith("..")
        return str(path) if goes_up and path.exists() else word
    if _is_in_skipped(inside, folder):
        return str(folder / inside)  # an environment is not copied, but used where it is
    if not Path(word).is_absolute() and not word.startswith(".."):
        return word
    return str(copy / inside) + ("/" if word.endswith("/") else "")


def _inside(path: Path, folder: Path) -> Path | None:
    """The path within the folder, also where one of the two was reached through a link."""
    resolved = folder.resolve()
    for one, other in ((path, folder), (path, resolved), (path.resolve(), resolved)):
        if one.is_relative_to(other):
            return one.relative_to(other)
    return None


def _is_in_skipped(inside: Path, folder: Path) -> bool:
    parts = [folder / parent for parent in (inside, *inside.parents)][:-1]
    return any(part.is_dir() and _is_skipped(part) for part in parts)


# -- the folder of a proof --------------------------------------------------------


@contextlib.contextmanager
def open_workplace(keep: Path | None) -> Iterator[tuple[Path, Path | None]]:
    """A folder to work in, with a short path; and its true path if it is kept."""
    if keep is None:
        folder = Path(tempfile.mkdtemp(prefix="holdfast-prove-")).resolve()
        try:
            yield folder, None
        finally:
            _forget_runs(folder)
            shutil.rmtree(folder, ignore_errors=True)
        return
    keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="proof-", dir=keep)).resolve()
    with tempfile.TemporaryDirectory(prefix="holdfast-") as short:
        # The path of a socket has room for about a hundred characters.
        link = Path(short).resolve() / "p"
        link.symlink_to(folder)
        try:
            yield link, folder
        finally:
            for place in (link, folder):  # the link is gone after this
                _wait_for_keepers(place)


def _forget_runs(folder: Path) -> None:
    """Wait for the keepers, and remove the memory that the runs have left."""
    _wait_for_keepers(folder)
    for path in folder.rglob(RunLayout(Path()).identity.name):
        with contextlib.suppress(HoldfastError, OSError):
            remove_leftovers(find_run(path.parent)[1], sys.maxsize, ())


def _wait_for_keepers(folder: Path) -> None:
    deadline = time.monotonic() + _KEEPER_SECONDS
    while any(_is_keeper(process, folder) for process in psutil.process_iter()):
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _is_keeper(process: psutil.Process, folder: Path) -> bool:
    try:
        text = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return "holdfast._keeper" in text and f"{folder}/" in text
