"""Stop requests, and the files by which another process makes them.

A request names its attempt, so that a late one cannot stop the next attempt of the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast import _errors
from holdfast._environment.processes.identity import host_name
from holdfast._errors import FolderError
from holdfast._store.folder.attempts import find_run, is_live, read_json, write_json
from holdfast._store.folder.layout import RunLayout

KINDS = ("stop", "save", "stacks")
SAME_PRESS_SECONDS = 0.1  # one Ctrl-C can arrive twice: from the terminal and forwarded


@dataclass(frozen=True)
class StopRequest:
    reason: str
    status: int
    number: int = 0  # of the signal, if it was one

    @property
    def is_by_clock(self) -> bool:
        """Whether the time of the job is over: it is not a signal and not a person's request."""
        return self.number == 0 and self.status == _errors.REQUEUE


def request_from_signal(number: int) -> StopRequest:
    return StopRequest(signal.Signals(number).name, _errors.status_of_signal(number), number)


def stop(folder: str | os.PathLike[str], reason: str = "", *, now: bool = False) -> None:
    """Ask the run in `folder` to stop, from any process that can write there.

    >>> holdfast.stop("runs/a")  # doctest: +SKIP
    """
    ask(Path(folder), "stop", reason=reason or "holdfast.stop()", now=now)


def save(folder: str | os.PathLike[str]) -> None:
    """Ask the run in `folder` for a checkpoint at its next boundary.

    >>> holdfast.save("runs/a")  # doctest: +SKIP
    """
    ask(Path(folder), "save")


def ask(folder: Path, kind: str, **details: Any) -> int:
    """Write a request for the live attempt of a run; returns the attempt's number."""
    assert kind in KINDS
    layout, _ = find_run(folder)
    numbers = layout.attempt_numbers()
    if not numbers or not is_live(layout, numbers[-1]):
        raise FolderError(f"{folder}: no process trains here now.\nSee: holdfast status {folder}")
    by = f"{_user()}@{host_name()}"
    try:
        write_json(layout.request(kind, numbers[-1]), {"by": by, **details})
    except OSError as error:
        raise FolderError(
            f"{folder}: the request could not be written ({error.strerror}).\n"
            "You need to be allowed to write into the run folder."
        ) from error
    return numbers[-1]


def take_requests(layout: RunLayout, attempt: int) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for kind in KINDS:
        path = layout.request(kind, attempt)
        with contextlib.suppress(OSError):
            if path.exists():
                details = read_json(path)
                path.unlink()
                known = ("by", "reason", "now", "token")
                found.append((kind, {k: v for k, v in details.items() if k in known}))
    return found


def stop_from_file(details: dict[str, Any]) -> StopRequest:
    reason = str(details.get("reason") or "holdfast stop")
    by = details.get("by")
    return StopRequest(f"{reason} (by {by})" if by else reason, _errors.PERSON)


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "someone"
