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
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from holdfast._report.status.gather import is_run

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


def copy_folder(source: Path, target: Path, without: Collection[Path] = ()) -> list[Path]:
    """Copy a folder without caches and environments; returns the files that were linked.

    `without` names further folders to leave out; the place of the copies always is.
    """
    source, target = source.resolve(), target.resolve()
    left_out = {target, *(path.resolve() for path in without)}
    if target.parent != source and target.parent.is_relative_to(source):
        left_out.add(target.parent)  # where the copies for other trainings are
    target.mkdir(parents=True, exist_ok=True)
    linked: list[Path] = []
    folders: list[tuple[Path, Path]] = []
    count = copied_bytes = 0
    for path, about in _walk(source, left_out):
        place = target / path.relative_to(source)
        if stat.S_ISDIR(about.st_mode):
            place.mkdir(exist_ok=True)
            folders.append((path, place))
        elif stat.S_ISLNK(about.st_mode):
            linked += _copy_link(path, place, source, target)
        elif _is_shared(path, about.st_size, count, copied_bytes):
            place.symlink_to(path)
            linked.append(path)
        elif _copy(path, place):
            count += 1
            copied_bytes += about.st_size
    # The innermost folder first: a copy inside changes the time of its folder.
    for path, place in reversed(folders):
        with contextlib.suppress(OSError):
            shutil.copystat(path, place)
            # The copy of a read-only folder must stay removable.
            place.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IRWXU)
    return linked


def _is_shared(path: Path, size_bytes: int, count: int, copied_bytes: int) -> bool:
    """Whether a file is linked, after so many copies."""
    if path.suffix in _CHECKPOINTS:
        return False
    if size_bytes > LARGE_BYTES:
        return True
    if path.suffix in _TEXTS or size_bytes < SMALL_BYTES:
        return count >= MOST_SMALL_FILES
    return count >= MOST_FILES or copied_bytes + size_bytes > MOST_BYTES


def _walk(folder: Path, left_out: Collection[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    """Each folder, file and link, with its own status."""
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
            if path not in left_out and not _is_skipped(path) and not is_run(path):
                yield path, about
                yield from _walk(path, left_out)
        elif stat.S_ISREG(about.st_mode) or stat.S_ISLNK(about.st_mode):
            yield path, about


def _is_skipped(folder: Path) -> bool:
    try:
        return folder.name in _SKIPPED or any((folder / name).exists() for name in _ENVIRONMENTS)
    except PermissionError:
        return False


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
    parts = [folder / parent for parent in (inside, *inside.parents)][:-1]
    if any(part.is_dir() and _is_skipped(part) for part in parts):
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
