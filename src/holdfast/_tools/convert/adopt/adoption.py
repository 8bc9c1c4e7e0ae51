"""A checkpoint that another library wrote becomes a run of one attempt, which has left."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast._errors import FolderError, HoldfastError, SaveFailed
from holdfast._run.exit.record import ExitRecord
from holdfast._run.saving.direct import write_direct
from holdfast._store.commit.checkpoint import Policy
from holdfast._store.folder import journal
from holdfast._store.folder.atomic import publish_folder, remove_folder, sync_folder
from holdfast._store.folder.attempts import claim, note_origin, open_folder
from holdfast._store.folder.layout import RunLayout
from holdfast._store.format.version import __version__
from holdfast._text import say
from holdfast._tools.convert.adopt.foreign import Adoption as Adoption
from holdfast._tools.convert.adopt.foreign import Prepared
from holdfast._tools.convert.adopt.formats import prepare


@dataclass(frozen=True)
class Adopted:
    """What was adopted."""

    prepared: Prepared
    size_bytes: int


def adopt_files(folder: Path, wanted: Adoption) -> Adopted:
    """Make a run of a checkpoint that another library wrote."""
    refuse_a_run(folder)
    prepared = prepare(wanted)
    publish_run(folder, lambda unfinished: _make_run(unfinished, prepared, wanted))
    return Adopted(prepared, sum(spec.size_bytes for spec in prepared.captured.specs))


def publish_run(folder: Path, make: Callable[[Path], None]) -> None:
    """Have a run folder made beside its place, and then rename it.

    A folder without its checkpoint would be a run that begins from nothing.
    """
    unfinished = folder.absolute().with_name(f".{folder.absolute().name}.{os.getpid()}.unfinished")
    try:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        sync_folder(unfinished)
        if not publish_folder(unfinished, folder.absolute()):
            raise _is_taken(folder)
    except (OSError, SaveFailed) as error:
        reason = getattr(error, "strerror", None) or error
        raise HoldfastError(
            f"{folder}: could not be written ({reason}).\n"
            "Nothing was left there. Choose a place that has room and that you may write to."
        ) from error
    finally:
        remove_folder(unfinished)


def _make_run(folder: Path, prepared: Prepared, wanted: Adoption) -> None:
    """A run of one attempt, which has one checkpoint and has left."""
    layout, run_id = open_folder(folder)
    attempt = claim(layout, folder, say)
    note_origin(layout, attempt, None)
    policy = Policy(layout, run_id, attempt, {attempt: None}, 1, None, __version__)
    adopted = {"from": prepared.source, "fresh": list(wanted.fresh), "kind": prepared.kind}
    head: dict[str, Any] = {
        "attempt": attempt,
        "world": 1,
        "common": "",
        "metrics": {},
        "best": None,
        "by_hand": False,
        "adopted": adopted,
    }
    step, source = prepared.step, prepared.source
    write_direct(policy, prepared.captured, head, step, "adopted")
    journal.append(layout.journal, "adopted", attempt=attempt, step=step, source=source)
    record = {"status": 0, "how": "closed", "reason": "adopted", "step": step}
    ExitRecord(layout, attempt).write(record, asked=False)


def refuse_a_run(folder: Path) -> None:
    layout = RunLayout(folder.absolute())
    if layout.identity.exists() or layout.checkpoints.exists():
        raise FolderError(
            f"{folder}: there is a run here already, and it was left as it is.\n"
            "Adopt into a new folder, and give Run that one."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise _is_taken(folder)


def _is_taken(folder: Path) -> FolderError:
    return FolderError(
        f"{folder}: is there already, and was left as it is.\nName a folder that is not there yet."
    )
