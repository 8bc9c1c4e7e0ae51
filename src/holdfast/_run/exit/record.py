"""How an attempt ended: its exit status, its reason, and the record of both."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import Any

from holdfast import _errors
from holdfast._errors import Stopped
from holdfast._store.folder import journal
from holdfast._store.folder.atomic import write_atomic
from holdfast._store.folder.attempts import release, write_json
from holdfast._store.folder.layout import RunLayout

_MESSAGE_LENGTH = 4000
_MOST_PARTS = 8  # of a group of exceptions


def status_of(error: BaseException | None) -> int:
    """The exit status that Python will give for this exception."""
    if error is None:
        return _errors.FINISHED
    if isinstance(error, Stopped):
        return error.status
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return _errors.PERSON if isinstance(error, KeyboardInterrupt) else 1


def reason_of(error: BaseException | None) -> str:
    if error is None:
        return "closed"
    if isinstance(error, Stopped):
        return error.reason
    return sentence_of(error)


def sentence_of(error: BaseException) -> str:
    """An exception as Python prints it, of bounded length."""
    return f"{type(error).__name__}: {text_of(error)}".strip(": ")


def text_of(error: BaseException) -> str:
    """The text of an exception; of a group also those of its parts."""
    try:
        said = str(error)[:_MESSAGE_LENGTH]
    except BaseException as broken:  # noqa: BLE001  the user's __str__ may raise anything
        return f"(its text could not be had: {type(broken).__name__})"
    if isinstance(error, BaseExceptionGroup):  # its own text only counts them
        parts = [sentence_of(each) for each in error.exceptions[:_MOST_PARTS]]
        said = f"{said}: {'; '.join(parts)}"[:_MESSAGE_LENGTH]
    return said


@dataclass(frozen=True)
class ExitRecord:
    """Writes the end of an attempt; of several ranks the first writes for all."""

    layout: RunLayout
    attempt: int
    rank: int = 0
    launcher: dict[str, Any] | None = None  # the process that restarts the run by itself

    def write(self, record: dict[str, Any], *, asked: bool) -> None:
        """Record the end, so that no other process waits for this attempt."""
        release(self.layout, self.attempt)  # first: the rest may fail on a full disk
        if self.rank:
            return
        journal.append(self.layout.journal, "exit", attempt=self.attempt, **record)
        told: dict[str, Any] = {**record, "time": time.time()}
        if asked and self.launcher is not None:
            # A launcher that restarts any failed process must not undo a stop.
            told = {**told, "asked": True, "launcher": self.launcher}
        with contextlib.suppress(OSError):
            write_json(self.layout.exit(self.attempt), told)

    def write_trouble(self, error: BaseException) -> None:
        """Keep a traceback that the user is not shown."""
        import traceback

        with contextlib.suppress(OSError):
            text = "".join(traceback.format_exception(error))
            path = self.layout.trouble(self.attempt, self.rank)
            write_atomic(path, text.encode("utf-8", "backslashreplace"), durable=False)
