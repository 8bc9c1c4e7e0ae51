"""Whether a run folder is made of plain files and folders, before anything in it is opened.

A FIFO holds whoever opens it, a file of gigabytes fills the memory, and a link may lead to what
is nobody's business here. Others may write into a shared folder, so each is looked for, by
`lstat`, and a folder is listed again only when it has changed.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from holdfast._record.layout import MANIFEST, RunLayout
from holdfast._status import words

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
            raise Odd(f"{words.name(path.removeprefix(f'{self._folder}/'))} is {what}.")


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
