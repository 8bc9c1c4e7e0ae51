"""Finding the runs below a folder, again and again.

A folder is listed anew only when its time of change has moved, and whether it is a run is
asked once. Links out of the folder are not followed; how many there are is told.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import _text
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import MANIFEST, RunLayout

# -- Whether a run folder is made of plain files and folders, before anything in it is opened ------
# A FIFO holds whoever opens it, a file of gigabytes fills the memory, and a link may lead to what
# is nobody's business here. Others may write into a shared folder, so each is looked for, by
# `lstat`, and a folder is listed again only when it has changed.


_MOST_JSON_BYTES = 64 << 20
_OURS = (
    *("run.json", "run.key", "mirror.json", "journal.jsonl"),
    *("attempts", "checkpoints", "requests", "set-aside"),
)


class Odd(Exception):
    """There is something in the run folder that is not opened; the text says what."""


class PlainCheck:
    """The files of one run folder; what was found plain is looked at again when it changes.

    Of thousands of runs this is most of what a look costs, hence paths that are texts.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder = str(folder)
        self._layout = RunLayout(folder)
        self._root = root
        # When a folder was last changed that was plain then, and the folders in it.
        self._seen: dict[str, tuple[int, list[str]]] = {}
        self._checkpoints: set[str] = set()

    def check(self) -> None:
        """Raise Odd at the first thing that is neither a plain file nor a plain folder."""
        self._check_entries(self._folder, _OURS)
        attempts = str(self._layout.attempts)
        self._check_entries(str(self._layout.requests))
        for name in self._check_entries(attempts):
            for inner in self._check_entries(f"{attempts}/{name}"):
                self._check_entries(f"{attempts}/{name}/{inner}")
        self._check_checkpoints()

    def _check_entries(self, folder: str, names: tuple[str, ...] | None = None) -> list[str]:
        """Look at what is in a folder if it has changed; returns the folders in it."""
        changed = _changed_at(folder)
        if changed is None:
            return []
        known = self._seen.get(folder)
        if known is not None and known[0] == changed:
            return known[1]
        folders = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if names is None or entry.name in names:
                    self._check_entry(entry)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
        self._seen[folder] = (changed, folders)
        return folders

    def _check_checkpoints(self) -> None:
        folder = str(self._layout.checkpoints)
        changed = _changed_at(folder)
        known = self._seen.get(folder)
        if changed is None or (known is not None and known[0] == changed):
            return
        with os.scandir(folder) as entries:
            found = {entry.name: entry for entry in entries if entry.name.startswith("step-")}
        for name in found.keys() - self._checkpoints:
            self._check_entry(found[name])
            self._check_kind(f"{folder}/{name}/{MANIFEST}")
        self._checkpoints = set(found)
        self._seen[folder] = (changed, [])

    def _check_entry(self, entry: os.DirEntry[str]) -> None:
        if entry.is_file(follow_symlinks=False):
            # What it is came with its name; its size would have to be asked for.
            if entry.name.endswith(".json"):
                self._check_kind(entry.path)
        elif not entry.is_dir(follow_symlinks=False):
            self._check_kind(entry.path)

    def _check_kind(self, path: str) -> None:
        try:
            found = os.lstat(path)
        except OSError:
            return  # gone meanwhile
        kind = found.st_mode
        what = ""
        if stat.S_ISLNK(kind):
            if not leads_inside(Path(path), self._root):
                what = "a link that leads out of the folder; it is not followed"
        elif not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            what = "neither a file nor a folder; it is not opened"
        elif path.endswith(".json") and found.st_size > _MOST_JSON_BYTES:
            what = f"{found.st_size >> 20} MiB large; it is not read"
        if what:
            raise Odd(f"{_text.name(path.removeprefix(f'{self._folder}/'))} is {what}.")


def leads_inside(link: Path, root: Path) -> bool:
    """Whether what a link leads to stands below `root` (which has no links in it)."""
    try:
        target = link.resolve(strict=True)
        # What it leads to is opened by its name, so that must be plain too.
        kind = target.stat().st_mode
    except (OSError, RuntimeError):
        return False
    return target.is_relative_to(root) and (stat.S_ISREG(kind) or stat.S_ISDIR(kind))


def is_plain_file(path: Path) -> bool:
    """Whether it can be read without surprise: a small regular file, and no link."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_JSON_BYTES


def _changed_at(folder: str) -> int | None:
    try:
        return os.lstat(folder).st_mtime_ns
    except OSError:
        return None


_DEPTH = 3  # as `holdfast status`
_MOST_RUNS = 20_000
_MOST_FOLDERS = 200_000
_SETTLED_NS = 2_000_000_000


@dataclass
class Found:
    """What one pass has found."""

    runs: list[Path] = field(default_factory=list)
    links: int = 0  # that lead out of the folder
    folders: int = 0
    is_cut: bool = False  # there is more than is looked at
    is_gone: bool = False  # the folder itself

    def notes(self) -> list[str]:
        """What a person should know about what is not shown."""
        said = ["This folder is gone."] if self.is_gone else []
        if self.links:
            what = "1 link leads" if self.links == 1 else f"{self.links} links lead"
            verb = "is" if self.links == 1 else "are"
            said.append(f"{what} out of this folder and {verb} not followed.")
        if self.is_cut:
            said.append(f"There is more here than {_MOST_RUNS} runs; the rest is not shown.")
        return said


@dataclass
class _Listing:
    changed_ns: int
    names: list[str]  # of folders that are no runs, or were none
    runs: list[Path] = field(default_factory=list)
    links: int = 0


class Finder:
    """Looks for runs below one folder, which has no links in its own path."""

    def __init__(self, root: Path, rest: Callable[[], None] = lambda: None) -> None:
        self._root = root
        self._rest = rest  # called for every folder: whoever looks may make pauses
        self._listings: dict[Path, _Listing] = {}
        self._runs: set[Path] = set()

    def find(self, tell: Callable[[Path], None] = lambda _: None) -> Found:
        """All runs there are now; `tell` hears of each that was not known before."""
        found = Found()
        if self._is_run(self._root, tell):
            found.runs.append(self._root)
        else:
            self._walk(self._root, _DEPTH, found, tell)
        found.is_gone = not found.runs and not self._root.is_dir()
        self._runs = set(found.runs)
        return found

    def _walk(self, folder: Path, depth: int, found: Found, tell: Callable[[Path], None]) -> None:
        self._rest()
        found.folders += 1
        if found.folders > _MOST_FOLDERS or len(found.runs) >= _MOST_RUNS:
            found.is_cut = True
            return
        listing = self._list(folder)
        found.links += listing.links
        # Of thousands of runs in a folder that has not changed, none is looked at again.
        found.runs += listing.runs
        others = []
        for name in listing.names:
            path = folder / name
            if self._is_run(path, tell):
                found.runs.append(path)
                listing.runs.append(path)
                continue
            others.append(name)
            if depth > 1:
                self._walk(path, depth - 1, found, tell)
        listing.names = others
        if len(found.runs) > _MOST_RUNS:
            del found.runs[_MOST_RUNS:]
            found.is_cut = True

    def _list(self, folder: Path) -> _Listing:
        try:
            changed = folder.lstat().st_mtime_ns
        except OSError:
            self._listings.pop(folder, None)
            return _Listing(0, [])
        known = self._listings.get(folder)
        if known is not None and known.changed_ns == changed:
            return known
        listing = _Listing(changed, [])
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_symlink():
                        # A run that a link inside leads to is found where it stands.
                        listing.links += not leads_inside(Path(entry.path), self._root)
                    elif entry.is_dir(follow_symlinks=False):
                        listing.names.append(entry.name)
        except OSError:  # not ours to read
            return listing
        if time.time_ns() - changed < _SETTLED_NS:
            listing.changed_ns = 0  # more may come within the same tick of its clock
        self._listings[folder] = listing
        return listing

    def _is_run(self, path: Path, tell: Callable[[Path], None]) -> bool:
        if path in self._runs:
            return True
        identity = RunLayout(path).identity
        # An empty or foreign run.json is none; a FIFO of that name must not hold us.
        if not is_plain_file(identity) or not read_json(identity).get("run_id"):
            return False
        self._runs.add(path)
        tell(path)
        return True
