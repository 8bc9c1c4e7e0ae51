"""What was logged so far, over all lives: `loggers/NAME.json` in the run folder.

A place in the life of a run is a mark: twice the steps that are complete, and one more at the turn
of an epoch. What a life logs after the boundary M has the mark M or a later one, and a life that
resumes from M logs all of that again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast._store.folder.atomic import write_atomic
from holdfast._store.folder.plain_file import read_plain

Row = dict[str, Any]  # "m": mark, "s": step, "t": time, "v": values; "b": between two loops

_MOST_TURNS = 2000
_ALL = 1 << 60


class Memory:
    """Of one logger, read at the beginning of its life; the process that logs writes it."""

    def __init__(self, path: Path, target: str) -> None:
        self._path = path
        self._target = target
        self.id = ""  # of the run, as the other side knows it
        self.stamp = 0  # of the newest event file
        self.is_whole = True  # whether the process before has come to its end
        self._last: dict[str, list[int]] = {}  # by name: its mark, and how many there
        self._here: dict[str, list[int]] = {}  # the same, of this life
        self._turns: list[Row] = []  # logged between the last step of an epoch and its turn
        self._load()

    def _load(self) -> None:
        try:
            known = json.loads(read_plain(self._path))
            if known["target"] != self._target:
                return  # it was logged elsewhere, where all of it is
            self.id, self.stamp = known["id"], known["stamp"]
            self.is_whole = known["whole"]
            self._last, self._turns = known["last"], known["turns"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return  # the first life, or as good as that

    def rewind(self, mark: int) -> list[Row]:
        """Forget what a life from this mark on makes again.

        What a reader that knows only steps would forget by mistake is returned: the rows of the
        same step that were logged before the turn of an epoch.
        """
        for name, (last, _) in list(self._last.items()):
            if last >= mark:
                self._last[name] = [mark - 1, _ALL]
        self._turns = [row for row in self._turns if row["m"] < mark]
        return [row for row in self._turns if row["m"] == mark - 1 and row["s"] == mark // 2]

    def know_step(self, name: str, step: int) -> None:
        """The other side has this step of a metric, whatever was written here."""
        self._last[name] = max(self._last.get(name, [-1, 0]), [2 * step + 1, _ALL])

    def without_known(self, row: Row) -> Row:
        """The row, less what an earlier life has logged."""
        fresh = {}
        for name, value in row["v"].items():
            mark, count = self._here.get(name, [-1, 0])
            self._here[name] = place = [row["m"], count + 1 if mark == row["m"] else 1]
            if place > self._last.get(name, [-1, 0]):
                fresh[name] = value
        return {**row, "v": fresh}

    def note(self, rows: list[Row]) -> None:
        """These rows are logged."""
        for row in rows:
            for name in row["v"]:
                mark, count = self._last.get(name, [-1, 0])
                self._last[name] = [row["m"], count + 1 if mark == row["m"] else 1]
            if row.get("b") and row["v"]:
                self._turns.append(row)
        del self._turns[:-_MOST_TURNS]

    def save(self, *, whole: bool = False) -> None:
        """Write it down; `whole`: nothing more comes from this process."""
        known = {
            "schema": 1,
            "target": self._target,
            "id": self.id,
            "stamp": self.stamp,
            "whole": whole,
            "last": self._last,
            "turns": self._turns,
        }
        write_atomic(self._path, json.dumps(known).encode())
