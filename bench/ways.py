"""What every way of saving and loading has: the limits of the machine, holdfast, and the peers."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import PEER
from bench.states import State


@dataclass
class Pending:
    """A save during which training may go on."""

    wait: Callable[[], Any]  # until it is durable
    is_over: Callable[[], bool] | None = None  # the same as a question, where there is one


class Way:
    """One way of saving a state, in a process of its own; the first saves warm it up."""

    name = ""
    kind = PEER
    package = ""  # the module without which there are no figures
    is_slow = False  # to import, or another setting of a peer that takes part anyway
    warm_ups = 2
    make_state: Callable[[], State] | None = None  # instead of the state that all others save

    @property
    def folder_name(self) -> str:
        return type(self).__name__

    def open(self, state: State, folder: Path) -> None:
        """Once, before the first save."""
        self.state, self.folder = state, folder

    def begin(self, number: int) -> Pending:
        """Save; returns when training may change its tensors again."""
        raise NotImplementedError

    def save(self, number: int) -> dict[str, float]:
        """Seconds until training may go on (`stall`), and until all is fsynced (`durable`)."""
        began = time.perf_counter()
        pending = self.begin(number)
        stall = time.perf_counter() - began
        pending.wait()
        return {"stall": stall, "durable": time.perf_counter() - began}

    def rest(self) -> None:
        """Wait until nothing of the last save goes on in the background."""

    def close(self) -> None:
        """Leave nothing behind but the last checkpoint."""

    def load(self, state: State, folder: Path) -> float:
        """Seconds until the state of the last save is in `state`, in a process of its own."""
        raise NotImplementedError

    def kept(self, number: int) -> Path:
        """Where a save goes; the one before it is gone by then."""
        return self.folder / f"save-{number}"


def seconds_of(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def sync_all(place: Path) -> None:
    """Fsync a file, or a folder with all that is in it, for a library that does not."""
    paths = [place, *(place.rglob("*") if place.is_dir() else ()), place.parent]
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
