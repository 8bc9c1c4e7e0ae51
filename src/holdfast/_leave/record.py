"""How an attempt ended, in words and as a status."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from holdfast._errors import Stopped
from holdfast._leave import statuses
from holdfast._record import journal
from holdfast._record.attempts import write_json
from holdfast._record.layout import RunLayout


def status_of(error: BaseException | None) -> int:
    """The exit status that Python will give for this exception."""
    if error is None:
        return statuses.FINISHED
    if isinstance(error, Stopped):
        return error.status
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return statuses.PERSON if isinstance(error, KeyboardInterrupt) else 1


def reason_of(error: BaseException | None) -> str:
    """In words."""
    if error is None:
        return "closed"
    if isinstance(error, Stopped):
        return error.reason
    return f"{type(error).__name__}: {error}".strip(": ")


def record_exit(layout: RunLayout, attempt: int, record: dict[str, Any]) -> None:
    """Note the end of an attempt, so that nobody waits for it or watches its heartbeat."""
    journal.append(layout.journal, "exit", attempt=attempt, **record)
    with contextlib.suppress(OSError):
        write_json(layout.exit(attempt), {**record, "time": time.time()})


def record_trouble(layout: RunLayout, attempt: int, error: BaseException) -> None:
    """Keep a traceback that the user is not shown."""
    import traceback

    with contextlib.suppress(OSError):
        text = "".join(traceback.format_exception(error))
        layout.trouble(attempt).write_text(text, encoding="utf-8")
