"""A checkpoint of a run in a format that other programs read.

Every checksum is verified before the first byte is written. Nothing of the user's state is left
out that the format has a place for; the random generators and holdfast's own values are. Of
several ranks it has what they share, with sharded tensors made whole, and rank 0's own values.
"""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast import _text
from holdfast._errors import (
    DamagedCheckpoint,
    FolderError,
    HoldfastError,
    NoGoodCheckpoint,
    SettingsError,
)
from holdfast._report.status.gather import states_in_memory
from holdfast._store.folder.attempts import find_run, known_origins
from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import is_on_line, trace_line
from holdfast._store.read.find import attempts_in_memory
from holdfast._store.read.merge_ranks import read_checkpoint
from holdfast._store.read.verify import Loaded, find_damage
from holdfast._tools.convert import writers


def export(folder: Path, request: writers.ExportRequest) -> Exported:
    layout, run_id = find_run(folder)
    request = replace(request, to=request.to or writers.SUFFIXES.get(request.out.suffix))
    _check_request(request, layout)
    chosen = _choose(folder, layout, run_id, request.step)
    state = chosen.loaded.head["tree"]["state"]
    if unknown := [name for name in request.only if name not in state]:
        raise SettingsError(
            f"{folder}: there is no {unknown[0]} in the state of this run.\n"
            f"There is: {', '.join(state) or 'nothing'}."
        )
    names = list(request.only or state)
    selected = writers.Selected(writers.put_together(chosen.loaded, names), names)
    assert request.to is not None
    try:
        done = writers.WRITERS[request.to][1](request, selected)
    except FileExistsError as error:
        raise writers.is_taken(request.out) from error
    except OSError as error:
        raise HoldfastError(
            f"{request.out}: could not be written ({error.strerror or error}).\n"
            "Nothing was left there. Choose a place that has room and that you may write to."
        ) from error
    newer = _newer_in_memory(layout, run_id, chosen) if request.step is None else None
    out = request.out
    files = out.iterdir() if out.is_dir() else [out]
    return Exported(chosen, *done, sum(each.stat().st_size for each in files), newer)


def _check_request(request: writers.ExportRequest, layout: RunLayout) -> None:
    """Refuse a request before gigabytes are read."""
    out = request.out
    if request.to is None:
        raise SettingsError(
            f"{out}: the ending names the format, and must be {' or '.join(writers.SUFFIXES)}.\n"
            f"Name it {out.stem or 'out'}.safetensors, which needs no framework to be read, or "
            f"{out.stem or 'out'}.pt for torch.load. Or give a folder, and --to dcp, huggingface "
            "or tensorflow."
        )
    if request.strip and len(request.only) != 1:
        raise SettingsError(
            "--strip drops the name of one state from the names of its tensors.\n"
            "Say of which: --only model --strip"
        )
    if request.config is not None and request.to != "huggingface":
        raise SettingsError(
            f"--config {request.config}: only a Hugging Face folder has a config.\n"
            "Add --to huggingface, or leave it out."
        )
    if not out.parent.is_dir():
        raise FolderError(
            f"{out.parent}: there is no such folder.\n"
            f"Make it first: mkdir -p {shlex.quote(str(out.parent))}"
        )
    if out.resolve().is_relative_to(layout.checkpoints.resolve()):
        raise FolderError(
            f"{out}: this is inside the run's own checkpoints, which no other program may change.\n"
            "Choose a place outside of the run."
        )
    writers.WRITERS[request.to][0](request)


_TRIES = 10  # a live run may remove the checkpoint that is being read
_NAMED = 12


@dataclass(frozen=True)
class Chosen:
    """A checkpoint with every checksum verified."""

    step: int
    attempt: int
    loaded: Loaded
    passed_over: list[str]  # why each newer one was not taken


@dataclass(frozen=True)
class Exported:
    chosen: Chosen
    tensors: int
    left_out: list[str]  # what the format has no place for
    size_bytes: int
    newer_in_memory: int | None  # a step that is not on disk yet


class _Removed(Exception):
    """The run has removed the checkpoint while it was read."""


def own_lineage(layout: RunLayout, run_id: str) -> dict[int, int | None]:
    newest = max(layout.attempt_numbers(), default=0)
    return trace_line(known_origins(layout, attempts_in_memory(run_id)), newest)


def _choose(folder: Path, layout: RunLayout, run_id: str, wanted: int | None) -> Chosen:
    for _ in range(_TRIES):
        with contextlib.suppress(_Removed):
            return _choose_now(folder, layout, run_id, wanted)
    raise HoldfastError(
        f"{folder}: the run removed its checkpoints faster than they could be read.\n"
        f"Take another, or stop the run first: {_text.command('ls', folder)}"
    )


def _choose_now(folder: Path, layout: RunLayout, run_id: str, wanted: int | None) -> Chosen:
    """The newest whole checkpoint on the run's own lineage, as a resume would choose it.

    Or that of one step: on the run's own lineage if there is one, else the newest of that step.
    Nothing is moved: a damaged one stays where it is.
    """
    line = own_lineage(layout, run_id)
    folders = layout.checkpoint_folders()
    matching = [each for each in folders if wanted in (None, each[0])]
    if wanted is not None and not matching:
        steps = sorted({step for step, _, _ in folders})
        shown = ("…, " if len(steps) > _NAMED else "") + ", ".join(map(str, steps[-_NAMED:]))
        known = f"There are: {shown}." if steps else "There is none yet."
        raise SettingsError(
            f"{folder}: there is no checkpoint of step {wanted}.\n"
            f"{known} To look: {_text.command('ls', folder)}"
        )
    on_line = [each for each in matching if is_on_line(line, each[1], each[0])]
    candidates = on_line[::-1] if wanted is None else (on_line or matching)[-1:]
    passed_over: list[str] = []
    for step, attempt, path in candidates:
        try:
            return Chosen(step, attempt, _read(step, attempt, path), passed_over)
        except DamagedCheckpoint as error:
            if wanted is not None:
                look = f"To see which are whole: {_text.command('verify', folder)}"
                raise DamagedCheckpoint(f"{error}\n{look}") from error
            passed_over.append(str(error))
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


def _newer_in_memory(layout: RunLayout, run_id: str, chosen: Chosen) -> int | None:
    """The newest step in memory, if it came after the chosen one."""
    line = own_lineage(layout, run_id)
    found = states_in_memory(run_id, line, are_checked=False)
    is_newer = bool(found) and found[-1][:2] > (chosen.attempt, chosen.step)
    return found[-1][1] if is_newer else None


def _read(step: int, attempt: int, path: Path) -> Loaded:
    try:
        loaded = read_checkpoint(path)
        # Of the other ranks, only what rank 0 shares has been read so far.
        if loaded.world > 1 and (damage := find_damage(path)):
            raise DamagedCheckpoint(f"{path}: {damage[0]}.")
    except DamagedCheckpoint as error:
        if not path.exists():
            raise _Removed from error
        raise
    head = loaded.head
    found = (head["step"], head.get("attempt", attempt))
    if found != (step, attempt):  # a folder's name has no checksum
        raise DamagedCheckpoint(f"{path}: it holds step {found[0]} of attempt {found[1]}.")
    return loaded
