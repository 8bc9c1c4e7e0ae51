"""What a Trainer has logged so far, as bytes whose place seldom changes.

The list grows with every log, and a state whose layout changes all the time cannot be held in
memory. So it is text in an array that doubles when it is full. Times and speeds are left out: they
are those of one life, and no two are alike.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

_LEAST = 1 << 14
_TIMES = ("_runtime", "_per_second")


class LogHistory:
    """The entries of a Trainer's `state.log_history`."""

    def __init__(self) -> None:
        self._text = np.zeros(_LEAST, np.uint8)
        self._used = 0
        self._entries = 0

    def follow(self, entries: list[dict[str, Any]]) -> None:
        """Add what is new; a list that is shorter than before is written anew."""
        if len(entries) < self._entries:
            self._used = self._entries = 0
            self._text[:] = 0
        for entry in entries[self._entries :]:
            self._add(json.dumps(lasting(entry), default=_plain).encode() + b"\n")
        self._entries = len(entries)

    def entries(self) -> list[dict[str, Any]]:
        lines = bytes(self._text[: self._used]).decode().splitlines()
        return [json.loads(line) for line in lines]

    def state(self) -> dict[str, Any]:
        return {"text": self._text, "used": self._used, "entries": self._entries}

    def load(self, state: Mapping[str, Any]) -> None:
        self._text = np.array(state["text"], np.uint8)
        self._used, self._entries = state["used"], state["entries"]

    def _add(self, line: bytes) -> None:
        end = self._used + len(line)
        size = len(self._text)
        while size < end:
            size *= 2
        if size > len(self._text):
            self._text = np.concatenate([self._text, np.zeros(size - len(self._text), np.uint8)])
        self._text[self._used : end] = np.frombuffer(line, np.uint8)
        self._used = end


def lasting(logs: Mapping[str, Any]) -> dict[str, Any]:
    """What was logged, without times, speeds and memory."""
    return {
        name: value
        for name, value in logs.items()
        if not name.endswith(_TIMES) and "_mem_" not in name
    }


def _plain(value: Any) -> Any:
    """What NumPy and torch hold, which JSON does not know, as numbers; all else as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
