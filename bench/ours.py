"""holdfast itself, as a user calls it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import holdfast
from bench.figures import OURS
from bench.machine import rest
from bench.states import State
from bench.ways import Pending, Way
from holdfast._run.driver import session_of

QUIET = holdfast.Settings(max_overhead=0, checkpoint_every="10h", keep_last=1)


class Holdfast(Way):
    """`run.save()` at a step's boundary: a snapshot into shared memory, which the keeper writes,
    checksums, fsyncs and renames; no setting but a cadence that leaves the saves to the bench."""

    name = "holdfast"
    kind = OURS
    warm_ups = 3  # each slot of the arena is used once

    def __init__(self, settings: holdfast.Settings = QUIET) -> None:
        self._settings = settings

    def open(self, state: State, folder: Path) -> None:
        super().open(state, folder)
        self.run = holdfast.Run(folder / "run", settings=self._settings, **state.objects())
        self.run.__enter__()
        self.run.boundary()

    def begin(self, number: int) -> Pending:  # noqa: ARG002  the run names its checkpoints
        handle = self.run.save()
        self.run.boundary()
        return Pending(handle.wait, lambda: handle.done)

    def rest(self) -> None:
        rest(session_of(self.run).keeper.keeper_pid)

    def close(self) -> None:
        self.run.__exit__(None, None, None)

    def load(self, state: State, folder: Path) -> float:
        run = holdfast.Run(folder / "run", settings=self._settings, **state.objects())
        began = time.perf_counter()
        run.__enter__()
        seconds = time.perf_counter() - began
        abandon(run)
        forget_memory(folder / "run")
        if run.step == 0:
            raise RuntimeError("the run began anew instead of resuming")
        return seconds


def abandon(run: holdfast.Run) -> None:
    """End a run's keeper, so that leaving the process writes nothing."""
    os.kill(session_of(run).keeper.keeper_pid, signal.SIGKILL)


def copy_run(template: Path, folder: Path) -> None:
    """The same run folder again, for a resume that finds what the last one found."""
    shutil.rmtree(folder, ignore_errors=True)

    def copy(source: str, target: str) -> None:
        # What is large is never written to in place, so it may be shared.
        (os.link if source.endswith(".safetensors") else shutil.copy2)(source, target)

    shutil.copytree(template, folder, copy_function=copy)


def forget_memory(run_folder: Path) -> None:
    """Remove what a run has left in shared memory."""
    from holdfast._store.folder.attempts import read_json
    from holdfast._store.memory.backing import find_leftovers

    identity = read_json(run_folder / "run.json").get("run_id")
    for path in find_leftovers(identity) if identity else []:
        with contextlib.suppress(OSError):
            path.unlink()
