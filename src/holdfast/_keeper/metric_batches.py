"""Batches of logged metrics, on their way from `run.log` to the keeper.

`run.log` appends and returns. A thread of the trainer reads the values about once a second, without
waiting for a device, and folds those of each metric into one entry: the size of a message does not
grow with the speed of the steps.
"""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

_MOST_KEPT = 8192  # calls of run.log within one beat; older ones are dropped
_MOST_NAMES = 200
_LONGEST_NAME = 500
_MOST_BYTES = 30_000  # of one message
_LOCK_SECONDS = 1.0
_LATE_BEATS = 10  # that a value may take to be computed


class Logged:
    """Metrics that were logged and not sent yet."""

    def __init__(self, read: Callable[[Any], float | None]) -> None:
        self._read = read
        self._new: deque[tuple[int, dict[str, Any]]] = deque(maxlen=_MOST_KEPT)
        self.append = self._new.append  # (completed steps, values as they are held)
        self._late: deque[tuple[int, dict[str, Any], int]] = deque(maxlen=_MOST_KEPT)
        self._names: set[str] = set()
        self._folds: dict[str, list[Any]] = {}
        self._lock = threading.Lock()

    def send(self, post: Callable[[dict[str, list[Any]]], bool]) -> None:
        """Fold new values and post them in messages of bounded size; a refused one is kept."""
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            return  # another thread sends it, and its wait must not delay a close
        try:
            late, self._late = self._late, deque(maxlen=_MOST_KEPT)
            for step, values, beats in late:
                self._fold_all(step, values, beats)
            for _ in range(len(self._new)):
                self._fold_all(*self._new.popleft(), 0)
            for names, part in _parts(self._folds):
                if not post(part):
                    return
                for name in names:
                    del self._folds[name]
        finally:
            self._lock.release()

    def _fold_all(self, step: int, values: dict[str, Any], beats: int) -> None:
        missing = None
        for name, held in values.items():
            number: float | None = held
            if type(held) is not float:  # the common case is the cheap one
                try:
                    number = self._read(held)
                except Exception:  # noqa: BLE001  a framework raises it again where its user reads it
                    continue
            if number is not None:
                fold = self._folds.get(name) or self._begin(name, step)
                if fold is not None:
                    _add(fold, step, number)
            elif hasattr(held, "is_ready"):  # JAX computes asynchronously: it will be ready soon
                missing = {**(missing or {}), name: held}
        if missing and beats < _LATE_BEATS:
            self._late.append((step, missing, beats + 1))

    def _begin(self, name: str, step: int) -> list[Any] | None:
        """A new entry for a metric; None if there are too many."""
        if name not in self._names:
            if len(self._names) >= _MOST_NAMES:
                return None
            self._names.add(name)
        fold = self._folds[name] = [None, None, None, 0, 0, step]
        return fold


def _add(fold: list[Any], step: int, number: float) -> None:
    fold[3] += 1
    if step < fold[5]:
        is_newest = fold[0] is None
    else:
        is_newest, fold[5] = True, step
    if not math.isfinite(number):
        fold[4] += 1
        return
    if is_newest:
        fold[0] = number
    if fold[1] is None:
        fold[1] = fold[2] = number
    elif number < fold[1]:
        fold[1] = number
    elif number > fold[2]:
        fold[2] = number


def add_fold(into: dict[str, list[Any]], name: str, fold: list[Any]) -> None:
    """Merge a later entry of a metric into the known one."""
    known = into.setdefault(name, [None, None, None, 0, 0, fold[5]])
    known[0] = known[0] if fold[0] is None else fold[0]
    lows = [each for each in (known[1], fold[1]) if each is not None]
    highs = [each for each in (known[2], fold[2]) if each is not None]
    known[1], known[2] = min(lows, default=None), max(highs, default=None)
    known[3] += fold[3]
    known[4] += fold[4]
    known[5] = max(known[5], fold[5])


def _parts(folds: dict[str, list[Any]]) -> Iterator[tuple[list[str], dict[str, list[Any]]]]:
    """Split the entries into messages, each with the names in it."""
    names: list[str] = []
    part: dict[str, list[Any]] = {}
    size = 0
    for name, fold in list(folds.items()):
        shown = name[:_LONGEST_NAME]
        length = len(json.dumps([shown, fold]))
        if part and size + length > _MOST_BYTES:
            yield names, part
            names, part, size = [], {}, 0
        names.append(name)
        part[shown] = fold
        size += length
    if part:
        yield names, part
