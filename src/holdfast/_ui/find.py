"""Finding the runs below a folder, again and again.

A folder is listed anew only when its time of change has moved, and whether it is a run is
asked once. Links out of the folder are not followed; how many there are is told.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast._record.attempts import read_json
from holdfast._record.layout import RunLayout
from holdfast._ui.plain import is_plain_file, leads_inside

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
