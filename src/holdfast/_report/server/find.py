"""Finding the runs below a folder, again and again, and what in a run folder is not read.

A folder is listed again only when its time of change has moved, and whether it is a run is
determined once. Links out of the folder are not followed; they are counted.
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
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.plain_file import MOST_RECORD_BYTES

_OURS = (
    *("run.json", "run.key", "mirror.json", "labels.json", "journal.jsonl"),
    *("attempts", "checkpoints", "requests", "set-aside"),
)


class Odd(Exception):
    """There is something in the run folder that is not opened; the text says what."""


class PlainCheck:
    """Finds pipes, links out of the root and giant records in one run folder.

    They are never opened in any case; this is for the row of the run, which says so. Of thousands
    of runs it is most of the cost, so paths are strings and a folder is listed only when changed.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder = str(folder)
        self._layout = RunLayout(folder)
        self._root = root
        self._seen: dict[str, tuple[int, list[str]]] = {}  # time of change, and folders in it

    def check(self) -> None:
        """Raise Odd at the first thing that is neither a plain file nor a plain folder."""
        self._check_folder(self._folder, _OURS)
        self._check_folder(str(self._layout.requests))
        self._check_folder(str(self._layout.checkpoints))
        attempts = str(self._layout.attempts)
        for name in self._check_folder(attempts):
            for inner in self._check_folder(f"{attempts}/{name}"):
                self._check_folder(f"{attempts}/{name}/{inner}")

    def _check_folder(self, folder: str, names: tuple[str, ...] | None = None) -> list[str]:
        """Check the entries if they have changed; returns the folders among them."""
        if (changed := changed_ns(folder)) < 0:
            return []
        known = self._seen.get(folder)
        if known is not None and known[0] == changed:
            return known[1]
        folders = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if names is not None and entry.name not in names:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                # The kind came with the name; the size has to be asked for.
                elif entry.name.endswith(".json") or not entry.is_file(follow_symlinks=False):
                    self._check_file(entry.path)
        self._seen[folder] = (changed, folders)
        return folders

    def _check_file(self, path: str) -> None:
        try:
            found = os.lstat(path)
        except OSError:
            return  # it was removed meanwhile
        what = ""
        if stat.S_ISLNK(found.st_mode):
            if not leads_inside(Path(path), self._root):
                what = "a link that leads out of the folder; it is not followed"
        elif not stat.S_ISREG(found.st_mode):
            what = "neither a file nor a folder; it is not opened"
        elif path.endswith(".json") and found.st_size > MOST_RECORD_BYTES:
            what = f"{found.st_size >> 20} MiB large; it is not read"
        if what:
            raise Odd(f"{_text.name(path.removeprefix(f'{self._folder}/'))} is {what}.")


def leads_inside(link: Path, root: Path) -> bool:
    """Whether the target of a link is below `root` (which has no links in its path)."""
    try:
        target = link.resolve(strict=True)
        kind = target.stat().st_mode
    except (OSError, RuntimeError):
        return False
    return target.is_relative_to(root) and (stat.S_ISREG(kind) or stat.S_ISDIR(kind))


def changed_ns(path: str | Path) -> int:
    """Its time of change; -1 if it is not there."""
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return -1


_DEPTH = 3  # as `holdfast status`
_MOST_RUNS = 20_000
_MOST_FOLDERS = 200_000
_SETTLED_NS = 2_000_000_000


@dataclass
class FoundRuns:
    runs: list[Path] = field(default_factory=list)
    links: int = 0  # that lead out of the folder
    folders: int = 0
    is_cut: bool = False  # a limit was reached
    is_gone: bool = False  # the folder itself

    def notes(self) -> list[str]:
        """Sentences on what is not shown."""
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
    names: list[str]  # of folders that are not known as runs
    runs: list[Path] = field(default_factory=list)
    links: int = 0


class RunFinder:
    """Finds runs below one folder, which has no links in its own path."""

    def __init__(self, root: Path, rest: Callable[[], None] = lambda: None) -> None:
        self._root = root
        self._rest = rest  # called for every folder, to make pauses
        self._listings: dict[Path, _Listing] = {}
        self._runs: set[Path] = set()

    def find(self, on_new: Callable[[Path], None] = lambda _: None) -> FoundRuns:
        """All runs there are now; `on_new` gets each that was not known before."""
        found = FoundRuns()
        if self._is_run(self._root, on_new):
            found.runs.append(self._root)
        else:
            self._walk(self._root, _DEPTH, found, on_new)
        found.is_gone = not found.runs and not self._root.is_dir()
        self._runs = set(found.runs)
        return found

    def _walk(
        self, folder: Path, depth: int, found: FoundRuns, on_new: Callable[[Path], None]
    ) -> None:
        self._rest()
        found.folders += 1
        if found.folders > _MOST_FOLDERS or len(found.runs) >= _MOST_RUNS:
            found.is_cut = True
            return
        listing = self._list(folder)
        found.links += listing.links
        # In a folder that has not changed, no known run is checked again.
        found.runs += listing.runs
        others = []
        for name in listing.names:
            path = folder / name
            if self._is_run(path, on_new):
                found.runs.append(path)
                listing.runs.append(path)
                continue
            others.append(name)
            if depth > 1:
                self._walk(path, depth - 1, found, on_new)
        listing.names = others
        if len(found.runs) > _MOST_RUNS:
            del found.runs[_MOST_RUNS:]
            found.is_cut = True

    def _list(self, folder: Path) -> _Listing:
        if (changed := changed_ns(folder)) < 0:
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
                        # The target of a link inside is found at its own place.
                        listing.links += not leads_inside(Path(entry.path), self._root)
                    elif entry.is_dir(follow_symlinks=False):
                        listing.names.append(entry.name)
        except OSError:  # not readable
            return listing
        if time.time_ns() - changed < _SETTLED_NS:
            listing.changed_ns = 0  # more may come within the same tick of its clock
        self._listings[folder] = listing
        return listing

    def _is_run(self, path: Path, on_new: Callable[[Path], None]) -> bool:
        if path in self._runs:
            return True
        if not read_json(RunLayout(path).identity).get("run_id"):
            return False
        self._runs.add(path)
        on_new(path)
        return True
