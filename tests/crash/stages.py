"""What a kill has hit, seen from outside: the slots in /dev/shm and the folders of a run."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from holdfast._store.folder.layout import RunLayout
from holdfast._store.memory.arena import _STATE, _WRITING, Arena, NotAnArena
from tests.support import Trainer, arena_files

AFTER_THE_FIRST_STEP = ("step", "snapshot", "commit")
INSIDE = ("snapshot", "commit")
# The fault points of a commit, and of the removal of an old checkpoint after it.
COMMIT_STAGES = (
    "begun",
    "half-written",
    "written",
    "synced",
    "manifest-written",
    "before-publish",
    "published",
    "before-removal",
    "half-removed",
)


@dataclass(frozen=True)
class Traced:
    """One line of the trace: a completed step and its time."""

    step: int
    time: float


def read_trace(trace: Path, start_bytes: int = 0) -> list[Traced]:
    """The steps that were completed since the trace had this size."""
    if not trace.exists():
        return []
    text = trace.read_bytes()[start_bytes:].decode()
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Traced(int(step), float(at)) for step, at in lines]


class Life:
    """One life of a training that is about to be killed, watched from outside."""

    def __init__(self, folder: Path, trace: Path, begin: Callable[[], Trainer]) -> None:
        self.layout = RunLayout(folder)
        self.attempt = (self.layout.attempt_numbers() or [0])[-1] + 1
        self._folder = folder
        self._trace = trace
        self._trace_start = trace.stat().st_size if trace.exists() else 0
        self._completed: list[Traced] | None = None
        self._arenas: dict[Path, Arena] = {}
        self._had_partial = False
        self.trainer = begin()  # last: it may have a number, and have made steps, in no time

    def has_begun(self) -> bool:
        return any(line.startswith("ready ") for line in self.trainer.lines)

    def close(self) -> None:
        """It is dead: what the next life writes into the trace is not its own any more."""
        self._completed = self.steps()
        for arena in self._arenas.values():
            arena.close()

    # -- while it lives ---------------------------------------------------------

    def look(self) -> bool:
        """Open the arenas that are new: the keeper removes their files when it is done."""
        if self.layout.identity.exists():
            for path in arena_files(self._folder):
                arena = None if path in self._arenas else _open_arena(path)
                if arena is not None:
                    self._arenas[path] = arena
        return bool(self._own())

    def is_writing(self) -> bool:
        """Whether a slot is being filled at this instant."""
        return any(
            arena._word(slot, _STATE) == _WRITING
            for arena in self._own()
            for slot in range(arena.slots)
        )

    def is_committing(self) -> bool:
        return bool(self.layout.partial_folders())

    def has_claimed(self) -> bool:
        return self.layout.attempt(self.attempt).exists()

    def steps(self) -> list[Traced]:
        """The steps that this life has completed."""
        if self._completed is not None:
            return self._completed
        return read_trace(self._trace, self._trace_start)

    def keeper_pids(self) -> list[int]:
        try:
            children = psutil.Process(self.trainer.pid).children()
        except psutil.Error:
            return []
        return [child.pid for child in children]

    # -- the kill ---------------------------------------------------------------

    def kill(self, number: int, pids: list[int], inside: str = "") -> str:
        """Signal these processes, inside a snapshot or a commit if asked to.

        Returns what was to be seen right before; what it hit, `stage` tells afterwards.
        """
        self.look()
        is_writing = False
        if inside == "snapshot":
            is_writing = spin_until(self.is_writing, 5)  # too short to look at anything else
        elif inside == "commit":
            self._had_partial = spin_until(self.is_committing, 5)
        else:
            is_writing, self._had_partial = self.is_writing(), self.is_committing()
        for pid in pids:
            os.kill(pid, number)
        self.look()
        return "snapshot" if is_writing else "commit" if self._had_partial else ""

    def stage(self) -> str:
        """What the kill has hit; the trainer is dead by now."""
        if not self.has_claimed():
            return "start-up"
        if not self.has_begun():
            return "restoring"
        if not self.steps():
            return "before the first step"
        if self.is_writing():
            return "snapshot"
        return "commit" if self._had_partial else "step"

    def newest_in_memory(self, *, hashed: bool) -> int:
        """The newest step that the dead trainer has left whole (and hashed), or -1."""
        found = [record for arena in self._own() for record in arena.whole()]
        return max((r.step for r in found if r.is_hashed or not hashed), default=-1)

    def newest_on_disk(self) -> int:
        """The newest step of this life that is a checkpoint, or -1."""
        folders = self.layout.checkpoint_folders()
        return max((step for step, attempt, _ in folders if attempt == self.attempt), default=-1)

    # -- inside -----------------------------------------------------------------

    def _own(self) -> list[Arena]:
        return [arena for arena in self._arenas.values() if arena.attempt == self.attempt]


def has_snapshot(folder: Path, *, hashed: bool = False, after: int = -1) -> bool:
    """Whether there is a whole snapshot of a step after `after` in memory, hashed if asked for."""
    found = []
    for path in arena_files(folder):
        arena = _open_arena(path)
        if arena is not None:
            with arena:
                found += arena.whole()
    return any(r.step > after and (r.is_hashed or not hashed) for r in found)


def _open_arena(path: Path) -> Arena | None:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        return Arena(descriptor)
    except (NotAnArena, ValueError):  # being made at this instant
        os.close(descriptor)
        return None


def spin_until(look: Callable[[], bool], seconds: float) -> bool:
    """Poll without a pause: what is waited for lasts a tenth of a millisecond."""
    deadline = time.monotonic() + seconds
    while not look():
        if time.monotonic() > deadline:
            return False
    return True


def attempt_of_arena(path: Path) -> int:
    match = re.search(r"-a(\d+)-g", path.name)
    assert match is not None
    return int(match[1])


def show(title: str, stages: list[str]) -> Counter[str]:
    """Print how often each stage was hit."""
    counts = Counter(stages)
    print(f"\n{title}: {len(stages)}")
    for stage, count in counts.most_common():
        print(f"  {stage:<22} {count:>4}  {'#' * count}")
    return counts


def check_spread(stages: list[str], inside_share: float) -> None:
    """The kills were where they hurt: in the loop, and some in the middle of saving."""
    after = sum(stage in AFTER_THE_FIRST_STEP for stage in stages)
    inside = sum(stage in INSIDE for stage in stages)
    assert after >= 0.6 * len(stages), stages
    assert inside >= inside_share * len(stages), stages
