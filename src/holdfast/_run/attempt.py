"""What a run was given, which attempt of it this process makes, and which runs it has open."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast._adapters.metrics import Metrics
from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name
from holdfast._environment.slurm.job import find_job
from holdfast._errors import RunIsLive, is_interactive
from holdfast._run.ranks.party import Party, come_together, leave_again, stopped_before
from holdfast._run.ranks.world import Launcher, World, find_launcher
from holdfast._run.signals.handlers import uninterruptible
from holdfast._settings import Settings
from holdfast._store.folder import journal
from holdfast._store.folder.attempts import claim
from holdfast._store.folder.layout import RunLayout
from holdfast._text import say
from holdfast.rules import Rule


@dataclass(frozen=True)
class RunSpec:
    """What `holdfast.Run` was given; the same for all its attempts."""

    folder: Path
    settings: Settings
    rule: Rule | None
    state: dict[str, Any]
    metrics: Metrics
    config: dict[str, Any]  # hyperparameters, as JSON values


class RunAttempt:
    """The number of one attempt, and the process and the ranks that make it."""

    def __init__(self, folder: Path, layout: RunLayout, run_id: str) -> None:
        self.folder = folder
        self.layout = layout
        self.run_id = run_id
        self.number = 0  # until it is claimed
        self.party: Party | None = None  # the ranks that opened the run together
        self.launcher: Launcher | None = None  # a process that restarts the run by itself
        self.in_job = find_job(variables.of_job()) is not None
        self.pid = os.getpid()
        self.thread = threading.get_ident()

    @property
    def rank(self) -> int:
        return 0 if self.party is None else self.party.rank

    @property
    def size(self) -> int:
        return 1 if self.party is None else self.party.size

    def claim(self, world: World, state: dict[str, Any]) -> None:
        """Claim the next number; with other ranks, the same for all of them."""
        self.launcher = find_launcher()
        if world.is_alone:
            stopped = stopped_before(self.layout, self.launcher)
            if stopped is not None:
                raise leave_again(self.folder, stopped, say)
            self.number = claim(self.layout, self.folder, say)
        else:
            self.party = come_together(world, self.layout, self.run_id, state, self.folder)
            self.number = self.party.take_attempt(self.layout, self.folder, say)

    @uninterruptible
    def journal(self, event: str, **fields: Any) -> None:
        """Append to the run's journal; of several ranks only the first writes."""
        if self.rank == 0:
            fields.setdefault("attempt", self.number)
            journal.append(self.layout.journal, event, **fields)


# -- Runs that this process has open ---------------------------------------------------------------
# A notebook cell that opens a run without `with`, and is interrupted or ends, leaves the run open.
# The next opening of the folder in the same interpreter is no second trainer: the forgotten session
# is closed, and the new one resumes from it.


class Closable(Protocol):
    """An open session, as far as it is needed here."""

    def close_forgotten(self) -> None: ...


_open: dict[str, tuple[Closable, int, threading.Thread]] = {}


def note_open(folder: Path, session: Closable) -> None:
    """Remember that this process and thread have the folder open."""
    _open[os.path.realpath(folder)] = (session, os.getpid(), threading.current_thread())


def note_closed(folder: Path) -> None:
    _open.pop(os.path.realpath(folder), None)


def close_forgotten(folder: Path) -> None:
    """Close the session that this interpreter left open in a folder; refuse if it is in use."""
    session, pid, thread = _open.get(os.path.realpath(folder), (None, 0, None))
    if session is None or thread is None or pid != os.getpid():
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
    say(f"{folder} was still open; closed, and continued from there. `with` closes it in time.")
    session.close_forgotten()
