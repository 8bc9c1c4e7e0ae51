"""Which checkpoint an export takes: the newest whole one on the run's own line, or a step.

Chosen as a resume chooses, but nothing is moved: what is damaged stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast import _text
from holdfast._errors import DamagedCheckpoint, HoldfastError, NoGoodCheckpoint, SettingsError
from holdfast._report.status.gather import states_in_memory
from holdfast._store.folder.attempts import known_origins
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import is_on_line, trace_line
from holdfast._store.read.damage import find_damage
from holdfast._store.read.find import attempts_in_memory
from holdfast._store.read.merge_ranks import read_checkpoint
from holdfast._store.read.verify import Loaded

_LOOKS = 10  # a live run removes old checkpoints, also the one that we read
_NAMED = 12


@dataclass(frozen=True)
class Chosen:
    """A checkpoint with every checksum verified."""

    step: int
    attempt: int
    loaded: Loaded
    passed_over: list[str]  # why each newer one was not taken


class _Removed(Exception):
    """The run has removed the checkpoint while it was read."""


def own_line(layout: RunLayout, run_id: str) -> dict[int, int | None]:
    """The run's own line of attempts as of today."""
    newest = max(layout.attempt_numbers(), default=0)
    return trace_line(known_origins(layout, attempts_in_memory(run_id)), newest)


def choose_newest(folder: Path, layout: RunLayout, run_id: str) -> Chosen:
    """The newest whole checkpoint on the run's own line."""
    for _ in range(_LOOKS):
        line = own_line(layout, run_id)
        folders = layout.checkpoint_folders()
        on_line = [each for each in reversed(folders) if is_on_line(line, each[1], each[0])]
        try:
            passed_over: list[str] = []
            for step, attempt, path in on_line:
                try:
                    loaded = _read(step, attempt, path)
                except DamagedCheckpoint as error:
                    passed_over.append(str(error))
                else:
                    return Chosen(step, attempt, loaded, passed_over)
        except _Removed:
            continue
        break
    else:
        raise HoldfastError(_too_fast(folder))
    if not folders:
        raise NoGoodCheckpoint(
            f"{folder}: there is no checkpoint yet.\n"
            f"A run that trains now makes one: {_text.command('save', folder)} --wait"
        )
    what = "whole" if on_line else "on this run's own line of attempts"
    look = _text.command("verify" if on_line else "ls", folder)
    raise NoGoodCheckpoint(
        f"{folder}: none of its {len(folders)} checkpoints is {what}.\nTo look closer: {look}"
    )


def choose_step(folder: Path, layout: RunLayout, run_id: str, wanted: int) -> Chosen:
    """The checkpoint of one step: on the run's own line if there is one, else the newest."""
    line = own_line(layout, run_id)
    folders = layout.checkpoint_folders()
    matching = [each for each in folders if each[0] == wanted]
    if not matching:
        raise SettingsError(
            f"{folder}: there is no checkpoint of step {wanted}.\n"
            f"{_known_steps(sorted({step for step, _, _ in folders}))} "
            f"To look: {_text.command('ls', folder)}"
        )
    on_line = [each for each in matching if is_on_line(line, each[1], each[0])]
    step, attempt, path = (on_line or matching)[-1]
    try:
        return Chosen(step, attempt, _read(step, attempt, path), [])
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(
            f"{error}\nTo see which are whole: {_text.command('verify', folder)}"
        ) from error
    except _Removed as error:
        raise HoldfastError(_too_fast(folder)) from error


def newer_in_memory(layout: RunLayout, run_id: str, chosen: Chosen) -> int | None:
    """The newest step that is in memory and came after the chosen one, if any."""
    line = own_line(layout, run_id)
    found = states_in_memory(run_id, line, are_checked=False)
    is_newer = bool(found) and (found[-1].attempt, found[-1].step) > (chosen.attempt, chosen.step)
    return found[-1].step if is_newer else None


def _read(step: int, attempt: int, path: Path) -> Loaded:
    try:
        loaded = read_checkpoint(path)
    except DamagedCheckpoint as error:
        if not path.exists():
            raise _Removed from error
        raise
    if loaded.world > 1 and (damage := find_damage(path)):
        # Of the other ranks only what rank 0 shares has been read.
        if not path.exists():
            raise _Removed
        raise DamagedCheckpoint(f"{path}: {damage[0]}.")
    head = loaded.head
    found = (head["step"], head.get("attempt", attempt))
    if found != (step, attempt):  # a folder's name has no checksum
        raise DamagedCheckpoint(f"{path}: it holds step {found[0]} of attempt {found[1]}.")
    return loaded


def _too_fast(folder: Path) -> str:
    return (
        f"{folder}: the run removed its checkpoints faster than they could be read.\n"
        f"Take another, or stop the run first: {_text.command('ls', folder)}"
    )


def _known_steps(steps: list[int]) -> str:
    if not steps:
        return "There is none yet."
    shown = ", ".join(map(str, steps[-_NAMED:]))
    return f"There are: {'…, ' if len(steps) > _NAMED else ''}{shown}."


# -- What the writers of all formats are given, and what they return -------------------------------


@dataclass(frozen=True)
class Wanted:
    """What is to be exported, and how."""

    out: Path
    step: int | None = None
    only: tuple[str, ...] = ()
    strip: bool = False
    force: bool = False
    to: str | None = None  # the format; else the ending of `out` says it
    config: Path | None = None  # of the model, for a Hugging Face folder


@dataclass(frozen=True)
class Selected:
    """The states that are to be written, with every checksum verified and every tensor whole."""

    loaded: Loaded
    names: list[str]

    @property
    def state(self) -> dict[str, Any]:
        """The stored tree of each."""
        found: dict[str, Any] = self.loaded.head["tree"]["state"]
        return {name: found[name] for name in self.names}


@dataclass(frozen=True)
class Written:
    """What was written, and what the format has no place for."""

    tensors: int
    size_bytes: int
    left_out: list[str] = field(default_factory=list)
