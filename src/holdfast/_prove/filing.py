"""The files that a script saves, renames and loads: which of them it resumes from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DIGITS = re.compile(r"[0-9]+")


@dataclass
class Saved:
    """A file that was saved whole."""

    place: int  # updates of the undisturbed run that were made
    in_handler: bool


class Filing:
    """Over all lives of one course."""

    def __init__(self, work: Path) -> None:
        self._work = work.resolve()
        self._course = self._work.parent
        self.torn: set[str] = set()  # files that were being saved when a life ended
        self._pending: dict[str, Saved] = {}
        self.saved: dict[str, Saved] = {}  # by path below the folder, as it is called now
        self.loaded: set[str] = set()
        self.failed: dict[str, str] = {}  # loads of this life that failed, with the error
        self.torn_failed: set[str] = set()  # those of them that were torn
        self.newest: Saved | None = None
        self.save_places: list[int] = []

    def begin_life(self) -> None:
        self.torn |= set(self._pending)
        self._pending.clear()
        self.failed = {}
        self.torn_failed = set()

    def has_any_like(self, names: Iterable[str]) -> bool:
        """Whether one of these is there, whole or torn; numbers in the names may be others."""
        wanted = {_DIGITS.sub("0", name) for name in names}
        return any(_DIGITS.sub("0", name) in wanted for name in self.torn.union(self.saved))

    def outside(self) -> list[str]:
        """Files that were saved outside of the course's folder, and are there."""
        away = [name for name in self.saved if Path(name).is_absolute()]
        return [n for n in away if not Path(n).is_relative_to(self._course) and Path(n).exists()]

    def note(self, event: Mapping[str, Any], place: int) -> None:
        kind = event["event"]
        if kind == "save":
            self.save_places.append(place)
            self._pending[self._name(event["path"])] = Saved(place, event["in_handler"])
        elif kind == "saved":
            name = self._name(event["path"])
            saved = self._pending.pop(name, None)
            if saved is not None:
                self.saved[name] = self.newest = saved
                self.torn.discard(name)
        elif kind == "rename":
            source, target = self._name(event["source"]), self._name(event["target"])
            if source in self.saved:
                self.saved[target] = self.saved.pop(source)
        elif kind == "loaded":
            self.loaded.add(self._name(event["path"]))
        elif kind == "load-failed" and not event["error"].startswith("FileNotFoundError"):
            self.loaded.add(self._name(event["path"]))
            name = self._name(event["path"])
            self.failed[name] = event["error"]
            self.torn_failed |= {name} & self.torn

    def _name(self, path: str) -> str:
        whole = Path(path)
        return str(whole.relative_to(self._work)) if whole.is_relative_to(self._work) else path
