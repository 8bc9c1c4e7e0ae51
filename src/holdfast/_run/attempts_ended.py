"""Runs that this process has open, and what a notebook does about one it forgot.

A cell that opens a run without `with`, and is interrupted or simply ends, leaves the run open.
The next opening of the folder in the same interpreter is no second trainer: the
forgotten one is closed, and the new one goes on from where it was.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Protocol

from holdfast._environment.processes.identity import host_name
from holdfast._errors import RunIsLive, is_interactive
from holdfast._text import say


class OpenRun(Protocol):
    """As much of a run as is needed here."""

    def close_forgotten(self) -> None: ...


_open: dict[str, tuple[OpenRun, int, threading.Thread]] = {}


def note_open(folder: Path, run: OpenRun) -> None:
    """Remember that this process and thread have the folder open."""
    _open[os.path.realpath(folder)] = (run, os.getpid(), threading.current_thread())


def note_closed(folder: Path) -> None:
    _open.pop(os.path.realpath(folder), None)


def close_forgotten(folder: Path) -> None:
    """Close the run that this interpreter has left open in a folder; refuse if it is in use."""
    run, pid, thread = _open.get(os.path.realpath(folder), (None, 0, None))
    if run is None or thread is None or pid != os.getpid():
        return
    is_elsewhere = thread is not threading.current_thread() and thread.is_alive()
    if not is_interactive() or is_elsewhere:
        where = f"in its thread {thread.name}" if is_elsewhere else "with another Run"
        raise RunIsLive(
            f"{folder}: this process trains here already, {where}.\n"
            f"End that one first (run.stop(), or leave its `with` block), or use another folder.",
            pid=pid,
            host=host_name(),
        )
    say(f"{folder} had been left open; closed, and going on from there. `with` closes it in time.")
    run.close_forgotten()
